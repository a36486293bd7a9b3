// Makes tests/text/tokenizers.json by Hugging Face's tokenizers (npm install tokenizers; node tokenizers.js TEXT OUT):
// a byte-level vocabulary of 256 bytes and 500 merges trained on TEXT, steps of several published tokenizers around it,
// and the ids and texts that the library gives for some strings. Beside it one of characters with byte fallback.
const fs = require('fs'), { Tokenizer } = require('tokenizers');
const [, , text, out] = process.argv;
const split = (Regex, behavior = 'Isolated', invert = false) => ({ type: 'Split', pattern: { Regex }, behavior, invert });
const seq = (...pretokenizers) => ({ type: 'Sequence', pretokenizers });
const bytes = (use_regex, add_prefix_space = false) => ({ type: 'ByteLevel', add_prefix_space, trim_offsets: true, use_regex });
const byteDecoder = { type: 'ByteLevel', add_prefix_space: true, trim_offsets: true, use_regex: true };
const added = [['<|end|>', true], ['<|pad|>', true, { lstrip: true, rstrip: true }], ['word', false, { single_word: true }], ['ABC', false], ['  ', false, { normalized: false }]];
const contractions = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", end = '| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+';
const llama3 = (n) => split(`${contractions}|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}${n}${end}`);
const U = '[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]', L = '[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]', P = '[^\\r\\n\\p{L}\\p{N}]?';
const o200k = split(`${P}${U}*${L}+${contractions}?|${P}${U}+${L}*${contractions}?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+`);
const deepseek = [split('\\p{N}{1,3}'), split('[一-龥぀-ゟ゠-ヿ]+'), split('[!"#$%&\'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+')];
const steps = [
  { name: 'gpt2', pre_tokenizer: bytes(true) },
  { name: 'gpt2 with a space', pre_tokenizer: bytes(true, true) },
  { name: 'llama3', pre_tokenizer: seq(llama3('{1,3}'), bytes(false)), whole: true, post_processor: { type: 'Sequence', processors: [{ type: 'ByteLevel', add_prefix_space: true, trim_offsets: false, use_regex: true }, { type: 'TemplateProcessing', single: [{ SpecialToken: { id: '<|end|>', type_id: 0 } }, { Sequence: { id: 'A', type_id: 0 } }], pair: [{ Sequence: { id: 'A', type_id: 0 } }], special_tokens: { '<|end|>': { id: '<|end|>', ids: ['END'], tokens: ['<|end|>'] } } }] } },
  { name: 'qwen2', normalizer: { type: 'NFC' }, pre_tokenizer: seq(llama3(''), bytes(false)) },
  { name: 'o200k', pre_tokenizer: seq(o200k, bytes(false)) },
  { name: 'deepseek', pre_tokenizer: seq(...deepseek, bytes(false)) },
  { name: 'falcon', pre_tokenizer: seq({ type: 'Punctuation', behavior: 'Contiguous' }, bytes(true), { type: 'Digits', individual_digits: false }, split('[0-9][0-9][0-9]')) },
  { name: 'starcoder', pre_tokenizer: seq({ type: 'Digits', individual_digits: true }, bytes(true)) },
  { name: 'other expression', normalizer: { type: 'Sequence', normalizers: [{ type: 'NFKC' }, { type: 'Lowercase' }, { type: 'Replace', pattern: { Regex: '[0-9]+' }, content: '#' }, { type: 'Strip', strip_left: true, strip_right: true }, { type: 'Replace', pattern: { String: 'the' }, content: 'THE' }, { type: 'Prepend', prepend: '>' }] }, pre_tokenizer: seq(split('[^\\S\\r\\n]?\\w+|\\d+', 'MergedWithNext'), split(' ', 'MergedWithPrevious'), split('[a-z]+', 'Removed', true), bytes(false)) },
  { name: 'accents', normalizer: { type: 'Sequence', normalizers: [{ type: 'NFD' }, { type: 'StripAccents' }, { type: 'NFKD' }] }, pre_tokenizer: seq({ type: 'WhitespaceSplit' }, { type: 'Punctuation', behavior: 'MergedWithPrevious' }, bytes(false, true)) },
];
const metaspace = (prepend_scheme, split) => ({ type: 'Metaspace', replacement: '▁', prepend_scheme, split });
const pieces = (...more) => ({ type: 'Sequence', decoders: [{ type: 'Replace', pattern: { String: '▁' }, content: ' ' }, { type: 'ByteFallback' }, { type: 'Fuse' }, ...more] });
const strip = { type: 'Strip', content: ' ', start: 1, stop: 0 }, spaces = { type: 'Replace', pattern: { String: ' ' }, content: '▁' };
const characters = [
  { name: 'llama2', normalizer: { type: 'Sequence', normalizers: [{ type: 'Prepend', prepend: '▁' }, spaces] }, pre_tokenizer: null, decoder: pieces(strip), uses: 'characters' },
  { name: 'mistral', pre_tokenizer: metaspace('first', false), decoder: pieces(strip), uses: 'characters' },
  { name: 'gemma', normalizer: spaces, pre_tokenizer: { type: 'Split', pattern: { String: ' ' }, behavior: 'MergedWithPrevious', invert: false }, decoder: pieces(), uses: 'characters' },
  { name: 'metaspace', pre_tokenizer: metaspace('always', true), decoder: metaspace('always', true), uses: 'characters' },
  { name: 'unigram', normalizer: { type: 'NFKC' }, pre_tokenizer: { type: 'Sequence', pretokenizers: [{ type: 'WhitespaceSplit' }, metaspace('always', true)] }, decoder: metaspace('always', true), uses: 'unigram' },
];
const strings = ['', ' ', '\n', "Hello world, it's a word; WORD's words", 'a  b   c\n\n  d\t\te \r\n', "I'LL you'Re he'ſ 'tis 123 4567 89,012", 'ABC ABCD  <|end|> <|pad|>  x<|end|><|end|>', 'naïve café e\u0301 Å ﬁ ½ ² Ⅷ ٣', '中文日本語ー 한국어 ไทย हिन्दी العربية', '😀👩‍👩‍👧 🏳️‍🌈 𝔘𝟘', 'if (x != y) { return a[i]->b; } // done\n', '\u0000\u0001\u007f\u0085\u00a0\u180e\u2028\u202f\u3000\u200b\ufeff\ufffd', 'CamelCase HTTPServer iPhone ÀÉ ǅ ʰAB ªb', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', '   leading and trailing   ', '각 각 a\u0327\u0301 \u0301x ẛ̣', "word wordy (word) the other's", 'x\n\n\n  y\n \n', '//// /* */ !!!\r\n\r\n--', '\u{10ffff}\u{e0100}\ud7ff\ue000', 'tokenization of the parameters and gradients'];
(async () => {
  const shape = (s) => ({ version: '1.0', truncation: null, padding: null, added_tokens: s.added || [], normalizer: s.normalizer || null, pre_tokenizer: s.pre_tokenizer, post_processor: s.post_processor || null, decoder: s.decoder || byteDecoder, model: s.model });
  const empty = { type: 'BPE', dropout: null, unk_token: null, continuing_subword_prefix: null, end_of_word_suffix: null, fuse_unk: false, byte_fallback: false, ignore_merges: false, vocab: {}, merges: [] };
  const trained = Tokenizer.fromString(JSON.stringify(shape({ pre_tokenizer: bytes(true), model: empty })));
  trained.train([text]);
  const merges = (trained.save(out), JSON.parse(fs.readFileSync(out))).model.merges.slice(0, 500).map((p) => (Array.isArray(p) ? p : p.split(' ')));
  const { byteLevelAlphabet } = require('tokenizers');
  const vocab = {};
  for (const t of byteLevelAlphabet().sort()) vocab[t] = Object.keys(vocab).length;
  for (const [a, b] of merges) vocab[a + b] = Object.keys(vocab).length;
  vocab['Ġunreachable'] = Object.keys(vocab).length;
  const size = Object.keys(vocab).length;
  const tokens = added.map(([content, special, flags], i) => ({ id: size + i, content, single_word: false, lstrip: false, rstrip: false, normalized: !special, special, ...flags }));
  const result = { model: { ...empty, vocab, merges: merges.map((p) => p.join(' ')) }, added_tokens: tokens, decoder: byteDecoder, strings, tokenizers: [] };
  // Characters, the bytes that stand for others, and merges of characters; the same with scores.
  const learner = Tokenizer.fromString(JSON.stringify(shape({ pre_tokenizer: metaspace('always', true), model: empty })));
  learner.train([text]);
  learner.save(out);
  const learned = JSON.parse(fs.readFileSync(out)).model, list = ['<unk>'];
  for (let i = 0; i < 256; i++) list.push(`<0x${i.toString(16).toUpperCase().padStart(2, '0')}>`);
  const own = learned.merges.slice(0, 300).map((p) => (Array.isArray(p) ? p : p.split(' ')));
  for (const t of [...Object.keys(learned.vocab).filter((k) => [...k].length === 1).sort(), ...own.map(([a, b]) => a + b)]) if (!list.includes(t)) list.push(t);
  result.characters = { ...empty, unk_token: '<unk>', fuse_unk: true, byte_fallback: true, vocab: Object.fromEntries(list.map((t, i) => [t, i])), merges: own };
  result.unigram = { type: 'Unigram', unk_id: 0, byte_fallback: false, vocab: list.map((t, i) => [t, i === 0 ? 0 : -(3 + ((i * 7919) % 997) / 100 + ([...t].length === 1 ? 4 : 0))]) };
  const unknown = [{ ...tokens[0], id: 0, content: '<unk>' }, { ...tokens[0], id: list.length }];
  for (const s of [...steps, ...characters]) {
    const described = JSON.parse(JSON.stringify(s).replace('"END"', size));
    const model = s.uses ? result[s.uses] : { ...result.model, ignore_merges: !!s.whole, merges: s.whole ? merges : result.model.merges };
    const t = Tokenizer.fromString(JSON.stringify(shape({ ...described, added: s.uses ? unknown : tokens, model })));
    const ids = [], framed = [], texts = [];
    for (const x of strings) {
      ids.push((await t.encode(x, null, { addSpecialTokens: false })).getIds());
      framed.push((await t.encode(x, null, { addSpecialTokens: true })).getIds().length);
      texts.push(await t.decode(ids[ids.length - 1], false));
    }
    result.tokenizers.push({ ...described, ...(s.uses ? { added_tokens: unknown } : {}), ids, framed, texts });
  }
  const line = (x) => JSON.stringify(x).replace(/[\u007f-\u00a0\u180e\u2000-\u200f\u2028\u2029\u202f\u3000\ufeff]/g, (c) => '\\u' + c.charCodeAt(0).toString(16).padStart(4, '0'));
  fs.writeFileSync(out, '{\n' + Object.entries(result).map(([k, v]) => `"${k}": ` + (k === 'tokenizers' ? '[\n' + v.map(line).join(',\n') + ']' : line(v))).join(',\n') + '}\n');
})();

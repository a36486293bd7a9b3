/* Tokenizers: bytes, files beside what Hugging Face's library gives (tokenizers.js), scanners
 * beside their expressions, damaged files. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/text/regex.h"
#include "runtime/text/scan.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/unicode.h"
#include "tests/test.h"

TEST(text, byte_tokens) {
    ml_tokenizer *t;
    ml_ids ids = {0};
    ml_bytes text = {0};
    CHECK_STATUS(ml_tokenizer_open("bytes", &t), ML_OK);
    CHECK_EQ_INT(ml_tokenizer_vocab(t), 256);
    CHECK_STATUS(ml_tokenizer_encode(t, "a\xff\n", 3, 0, &ids), ML_OK);
    CHECK_EQ_INT(ids.count, 3);
    CHECK_EQ_INT(ids.at[1], 255);
    CHECK_STATUS(ml_tokenizer_decode(t, ids.at, ids.count, 0, &text), ML_OK);
    CHECK(text.count == 3 && memcmp(text.at, "a\xff\n", 3) == 0);
    CHECK_EQ_INT(ml_tokenizer_id(t, "a"), 'a');
    CHECK_STATUS(ml_tokenizer_decode(t, &(uint32_t){256}, 1, 0, &text), ML_INVALID);
    CHECK_TEXT(ml_error_last()->text, "id 256 is not a token of bytes, which has 256");
    ml_ids_free(&ids);
    ml_bytes_free(&text);
    ml_tokenizer_close(t);
}

/* ---- Files ------------------------------------------------------------------------------------
 */

static void write_file(const char *path, const char *text, size_t bytes) {
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    CHECK(fwrite(text, 1, bytes, file) == bytes);
    fclose(file);
}

static void temporary(char path[64]) {
    snprintf(path, 64, "/tmp/mlua-tokenizer-%d.json", (int)getpid());
}

/* One of tokenizers.json as the text of a tokenizer.json; freed by the caller. */
static char *compose(const json_t *all, const json_t *steps) {
    json_t *root = json_copy((json_t *)steps);
    json_t *model = json_copy(json_object_get(all, "model"));
    json_object_set_new(model, "ignore_merges",
                        json_boolean(json_is_true(json_object_get(steps, "whole"))));
    const char *uses = json_string_value(json_object_get(steps, "uses"));
    json_object_set(root, "model", uses ? json_object_get(all, uses) : model);
    json_decref(model);
    static const char *const shared[] = {"added_tokens", "decoder"};
    for (int i = 0; i < 2; i++)
        if (!json_object_get(root, shared[i]))
            json_object_set(root, shared[i], json_object_get(all, shared[i]));
    char *text = json_dumps(root, 0);
    json_decref(root);
    return text;
}

/* The text that ids give one by one is `expected`. */
static void check_stream(const ml_tokenizer *t, const ml_ids *ids, const json_t *decoded,
                         const char *name) {
    const char *expected = json_string_value(decoded);
    size_t bytes = json_string_length(decoded);
    ml_decoder *decoder;
    ml_bytes text = {0};
    REQUIRE(ml_decoder_open(t, 0, &decoder) == ML_OK);
    for (int64_t i = 0; i < ids->count; i++) {
        CHECK_STATUS(ml_decoder_add(decoder, ids->at[i], &text), ML_OK);
        int length;
        const unsigned char *at = (unsigned char *)text.at, *end = at + text.count;
        for (; at < end; at += length)
            EXPECT(unicode_read(at, end, &length) < TEXT_NO_CHARACTER, "%s: half a character",
                   name);
    }
    CHECK_STATUS(ml_decoder_end(decoder, &text), ML_OK);
    EXPECT(text.count == bytes && memcmp(text.at ? text.at : "", expected, text.count) == 0,
           "%s: decoded one by one \"%.*s\" instead of \"%s\"", name, (int)text.count, text.at,
           expected);
    ml_bytes_free(&text);
    ml_decoder_close(decoder);
}

static void check_string(ml_tokenizer *t, ml_encoder *encoder, const json_t *steps,
                         const json_t *string, size_t which) {
    const char *name = json_string_value(json_object_get(steps, "name"));
    const json_t *ids = json_array_get(json_object_get(steps, "ids"), which);
    const char *text = json_string_value(string);
    size_t bytes = json_string_length(string), count = json_array_size(ids);
    ml_ids made = {0}, framed = {0};
    CHECK_STATUS(ml_encoder_encode(encoder, text, bytes, 0, &made), ML_OK);
    CHECK_STATUS(ml_encoder_encode(encoder, text, bytes, ML_ENCODE_FRAME, &framed), ML_OK);
    bool same = made.count == (int64_t)count;
    for (size_t i = 0; same && i < count; i++)
        same = made.at[i] == json_integer_value(json_array_get(ids, i));
    EXPECT(same, "%s: \"%s\" has other ids", name, text);
    CHECK_EQ_INT(framed.count,
                 json_integer_value(json_array_get(json_object_get(steps, "framed"), which)));
    const json_t *decoded = json_array_get(json_object_get(steps, "texts"), which);
    check_stream(t, &made, decoded, name);
    ml_ids_free(&made);
    ml_ids_free(&framed);
}

static json_t *read_fixture(void) {
    json_t *all = json_load_file("tests/text/tokenizers.json", JSON_ALLOW_NUL, NULL);
    REQUIRE(all != NULL);
    return all;
}

TEST(text, as_hugging_face) {
    json_t *all = read_fixture(), *steps, *string;
    char path[64];
    size_t i, k;
    temporary(path);
    json_array_foreach(json_object_get(all, "tokenizers"), i, steps) {
        char *text = compose(all, steps);
        write_file(path, text, strlen(text));
        free(text);
        ml_tokenizer *t;
        ml_encoder *encoder;
        if (!CHECK_STATUS(ml_tokenizer_open(path, &t), ML_OK)) continue;
        REQUIRE(ml_encoder_open(t, &encoder) == ML_OK);
        for (int pass = 0; pass < 2; pass++) /* the second from the cache */
            json_array_foreach(json_object_get(all, "strings"), k, string)
                check_string(t, encoder, steps, string, k);
        ml_encoder_close(encoder);
        ml_tokenizer_close(t);
    }
    unlink(path);
    json_decref(all);
}

/* ---- SentencePiece -----------------------------------------------------------------------------
 */

static void add_varint(ml_bytes *to, uint64_t value) {
    for (; value > 127; value >>= 7) ml_bytes_add(to, (char[]){(char)(value | 0x80)}, 1);
    ml_bytes_add(to, (char[]){(char)value}, 1);
}

static void add_piece(ml_bytes *to, const char *text, float score, unsigned type) {
    size_t bytes = strlen(text);
    add_varint(to, 1 << 3 | 2);
    add_varint(to, 2 + bytes + 5 + 2);
    add_varint(to, 1 << 3 | 2);
    add_varint(to, bytes);
    ml_bytes_add(to, text, bytes);
    add_varint(to, 2 << 3 | 5);
    ml_bytes_add(to, &score, 4);
    add_varint(to, 3 << 3 | 0);
    add_varint(to, type);
}

/* The fixture's BPE of characters as a .model: the ids are those of its tokenizer.json "llama2". */
TEST(text, sentencepiece_model) {
    json_t *all = read_fixture(), *steps, *value, *string;
    json_t *vocab = json_object_get(json_object_get(all, "characters"), "vocab");
    const char *key, *tokens[2048];
    size_t count = 0, which, k;
    ml_bytes file = {0};
    json_object_foreach(vocab, key, value) {
        REQUIRE(json_integer_value(value) < 2048);
        tokens[json_integer_value(value)] = key;
        count++;
    }
    for (size_t i = 0; i < count; i++)
        add_piece(&file, tokens[i], -(float)i, i == 0 ? 2 : i < 257 ? 6 : 1);
    /* trainer: bpe, byte_fallback, bos and eos -1; normalizer: keeps spaces. */
    ml_bytes_add(&file,
                 "\x12\x1d\x18\x02\x98\x02\x01\xc8\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
                 "\xd0\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x1a\x02\x20\x00",
                 35);
    char path[64];
    temporary(path);
    write_file(path, file.at, file.count);
    ml_tokenizer *t;
    ml_encoder *encoder;
    REQUIRE(ml_tokenizer_open(path, &t) == ML_OK && ml_encoder_open(t, &encoder) == ML_OK);
    CHECK_EQ_INT(ml_tokenizer_vocab(t), (int64_t)count);
    CHECK_EQ_INT(ml_tokenizer_bos(t), -1);
    json_array_foreach(json_object_get(all, "tokenizers"), which, steps) {
        if (strcmp(json_string_value(json_object_get(steps, "name")), "llama2") != 0) continue;
        json_array_foreach(json_object_get(all, "strings"), k,
                           string) if (!strstr(json_string_value(string), "<|end|>"))
            check_string(t, encoder, steps, string, k);
    }
    ml_encoder_close(encoder);
    ml_tokenizer_close(t);
    for (size_t i = 1; i < file.count; i += 1 + file.count / 200) { /* cut off, and changed */
        file.at[i] ^= (char)(i % 251);
        write_file(path, file.at, file.count - i % 7);
        if (ml_tokenizer_open(path, &t) == ML_OK) {
            ml_ids ids = {0};
            CHECK_STATUS(ml_tokenizer_encode(t, "a b \xC3\xA9", 6, 0, &ids), ML_OK);
            ml_ids_free(&ids);
            ml_tokenizer_close(t);
        }
        file.at[i] ^= (char)(i % 251);
    }
    unlink(path);
    ml_bytes_free(&file);
    json_decref(all);
}

/* One tokenizer of the fixture, open. */
/* One of tokenizers.json, with the fields of `more` where it is not NULL. */
static ml_tokenizer *open_changed(size_t which, json_t *more) {
    json_t *all = read_fixture();
    json_t *steps = json_array_get(json_object_get(all, "tokenizers"), which);
    if (more) json_object_update_new(steps, more);
    char path[64], *text = compose(all, steps);
    ml_tokenizer *t = NULL;
    temporary(path);
    write_file(path, text, strlen(text));
    CHECK_STATUS(ml_tokenizer_open(path, &t), ML_OK);
    unlink(path);
    free(text);
    json_decref(all);
    return t;
}

static ml_tokenizer *open_fixture(size_t which) {
    return open_changed(which, NULL);
}

/* What cuts a text off or fills it up in Hugging Face's library does neither. */
TEST(text, truncation_and_padding_change_no_ids) {
    static const char text[] = "tokens of a text that is longer than two";
    for (int kind = 0; kind < 2; kind++) { /* cut to 2, filled to 64 */
        json_t *more = kind ? json_pack("{s:{s:{s:i},s:s,s:n,s:i,s:i,s:s}}", "padding", "strategy",
                                        "Fixed", 64, "direction", "Right", "pad_to_multiple_of",
                                        "pad_id", 0, "pad_type_id", 0, "pad_token", "<|pad|>")
                            : json_pack("{s:{s:s,s:i,s:s,s:i}}", "truncation", "direction", "Right",
                                        "max_length", 2, "strategy", "LongestFirst", "stride", 0);
        REQUIRE(more != NULL);
        ml_tokenizer *t[] = {open_fixture(2), open_changed(2, more)};
        ml_ids ids[2] = {{0}, {0}};
        REQUIRE(t[0] && t[1]);
        for (int i = 0; i < 2; i++)
            CHECK_STATUS(ml_tokenizer_encode(t[i], text, strlen(text), ML_ENCODE_FRAME, &ids[i]),
                         ML_OK);
        CHECK(ids[0].count > 2 && ids[0].count < 64 && ids[1].count == ids[0].count &&
              memcmp(ids[0].at, ids[1].at, (size_t)ids[0].count * sizeof *ids[0].at) == 0);
        for (int i = 0; i < 2; i++) {
            ml_ids_free(&ids[i]);
            ml_tokenizer_close(t[i]);
        }
    }
}

/* Bytes of all kinds, more of those that mean something. */
static size_t random_text(uint64_t *seed, char *to, size_t most) {
    static const char *const parts[] = {" ",
                                        "  ",
                                        "\n",
                                        "\r\n",
                                        "'s",
                                        "'LL",
                                        "'\xC5\xBF",
                                        "\xCC\x81",
                                        "\xE4\xB8\xAD",
                                        "a",
                                        "Zz",
                                        "123",
                                        "\xC2\xA0",
                                        "\xE2\x80\xA8",
                                        "\xCA\xB0",
                                        "\xC7\x85",
                                        "!?",
                                        "/",
                                        "\xF0\x9F\x98\x80",
                                        "\xE1\xA0\x8E",
                                        "\xEF\xBD\x9C",
                                        "\xC2\xBD",
                                        "\xE0\xA4\xBF",
                                        "<|end|>",
                                        "word",
                                        "\xC3",
                                        "\xE4\xB8",
                                        "\xED\xA0\x80"};
    size_t bytes = 0, count = (size_t)test_range(seed, 0, 24);
    for (size_t i = 0; i < count; i++) {
        const char *part = parts[test_range(seed, 0, sizeof parts / sizeof *parts - 1)];
        char other[4];
        size_t length = strlen(part);
        int64_t kind = test_range(seed, 0, 9);
        if (kind == 0) other[0] = (char)test_range(seed, 0, 255), part = other, length = 1;
        if (kind == 1) {
            uint32_t c = (uint32_t)test_range(seed, 0, 0x7FF);
            length = (size_t)unicode_write(c, other), part = other;
        }
        if (bytes + length > most) break;
        memcpy(to + bytes, part, length);
        bytes += length;
    }
    return bytes;
}

TEST(text, round_trip_of_bytes) {
    ml_tokenizer *t = open_fixture(2);
    ml_encoder *encoder;
    uint64_t seed = 7;
    char text[256];
    REQUIRE(t && ml_encoder_open(t, &encoder) == ML_OK);
    for (int i = 0; i < 2000; i++) {
        size_t bytes = random_text(&seed, text, sizeof text);
        ml_ids ids = {0};
        ml_bytes back = {0};
        CHECK_STATUS(ml_encoder_encode(encoder, text, bytes, ML_ENCODE_PLAIN, &ids), ML_OK);
        CHECK_STATUS(ml_tokenizer_decode(t, ids.at, ids.count, 0, &back), ML_OK);
        CHECK(back.count == bytes && (!bytes || memcmp(back.at, text, bytes) == 0));
        ml_ids_free(&ids);
        ml_bytes_free(&back);
    }
    ml_encoder_close(encoder);
    ml_tokenizer_close(t);
}

TEST(text, long_runs_are_not_quadratic) {
    ml_tokenizer *t = open_fixture(0);
    size_t bytes = 1 << 18;
    char *text = malloc(bytes);
    ml_ids ids = {0};
    ml_bytes back = {0};
    REQUIRE(t && text);
    memset(text, 'a', bytes);
    CHECK_STATUS(ml_tokenizer_encode(t, text, bytes, 0, &ids), ML_OK);
    CHECK_STATUS(ml_tokenizer_decode(t, ids.at, ids.count, 0, &back), ML_OK);
    CHECK(back.count == bytes && memcmp(back.at, text, bytes) == 0);
    free(text);
    ml_ids_free(&ids);
    ml_bytes_free(&back);
    ml_tokenizer_close(t);
}

/* ---- Scanners ---------------------------------------------------------------------------------
 */

static void add_length(void *lengths, const char *piece, size_t bytes) {
    (void)piece;
    CHECK_STATUS(ml_ids_add(lengths, (uint32_t)bytes), ML_OK);
}

/* The pieces by the expression: matches, and what lies between them. */
static void match_text(regex_matcher *matcher, const void *code, const char *text, size_t bytes,
                       ml_ids *lengths) {
    size_t at = 0, begin, end;
    while (at < bytes && regex_find(matcher, code, text, bytes, at, &begin, &end) == 1) {
        if (begin > at) add_length(lengths, text, begin - at);
        add_length(lengths, text, end - begin);
        at = end;
    }
    if (at < bytes) add_length(lengths, text, bytes - at);
}

/* By code point: PCRE2 has it in its table, which may be of an older Unicode than the scanners'. */
static bool *known_characters(regex_matcher *matcher) {
    static const char pattern[] = "\\P{Cn}+";
    bool *known = calloc(TEXT_NO_CHARACTER, sizeof *known);
    uint32_t *of = malloc(TEXT_NO_CHARACTER * 4 * sizeof *of);
    char *all = malloc(TEXT_NO_CHARACTER * 4);
    size_t bytes = 0, begin, end;
    void *code;
    if (!known || !of || !all || regex_compile(pattern, strlen(pattern), &code)) abort();
    for (uint32_t c = 0; c < TEXT_NO_CHARACTER; c++) {
        if (c >= 0xD800 && c < 0xE000) continue; /* surrogates */
        of[bytes] = c;
        bytes += (size_t)unicode_write(c, all + bytes);
    }
    for (size_t at = 0; regex_find(matcher, code, all, bytes, at, &begin, &end) == 1; at = end)
        for (size_t k = begin; k < end; k++)
            if ((all[k] & 0xC0) != 0x80) known[of[k]] = true;
    regex_free(code);
    free(of);
    free(all);
    return known;
}

/* Expressions match no invalid bytes. */
static void make_valid(const bool *known, char *text, size_t bytes) {
    for (size_t k = 0; k < bytes; k++) {
        int length;
        const unsigned char *p = (unsigned char *)text + k;
        uint32_t c = unicode_read(p, (unsigned char *)text + bytes, &length);
        if (c < TEXT_NO_CHARACTER && known[c])
            k += (size_t)length - 1;
        else
            text[k] = 'e';
    }
}

/* A scanner and its expression find the same pieces, by their lengths. */
static void compare_pieces(regex_matcher *matcher, int kind, const char *pattern, const void *code,
                           const char *text, size_t bytes) {
    ml_ids scanned = {0}, matched = {0};
    scan_text(kind, text, bytes, add_length, &scanned);
    match_text(matcher, code, text, bytes, &matched);
    int64_t k = 0;
    size_t at = 0;
    while (k < scanned.count && k < matched.count && scanned.at[k] == matched.at[k])
        at += scanned.at[k++];
    EXPECT(k == scanned.count && k == matched.count,
           "%s parts \"%.*s\" otherwise: at byte %zu, piece %lld", pattern,
           (int)(bytes - at < 200 ? bytes - at : 200), text + at, at, (long long)k);
    ml_ids_free(&scanned);
    ml_ids_free(&matched);
}

/* Mostly what the masks of scan_block.c part: runs, contractions, digits, signs before line breaks;
 * in every second text one character in 64 is not ASCII. */
static size_t block_text(uint64_t *seed, char *text, size_t room) {
    static const char *const parts[] = {
        "a",  "b", "F",  "Q",  "e",   "s",    " ",  " ", "  ", "    ", "\n",         "\r\n",
        "\t", "'", "'s", "'S", "'ll", "'lL",  "'r", "/", "(",  "{",    "==",         "--",
        "0",  "1", "23", "!",  "x",   "\n\n", ";",  ")", "_",  "\f",   "abcdefghij", "'d'"};
    static const char *const others[] = {"\u00e9", "\u4e2d", "\u3000",    "\u017f",
                                         "\u00a0", "\u0301", "\U0001f600"};
    const bool ascii = test_range(seed, 0, 1);
    for (size_t bytes = 0;;) {
        const char *part = parts[test_range(seed, 0, sizeof parts / sizeof *parts - 1)];
        if (!ascii && test_range(seed, 0, 63) == 0) part = others[test_range(seed, 0, 6)];
        size_t length = strlen(part);
        if (bytes + length > room) return bytes;
        memcpy(text + bytes, part, length);
        bytes += length;
    }
}

/* The texts that next() writes, all scanners; it returns their bytes, -1 at the end. */
static void compare_scanners(long next(void *context, int round, char *text), void *context,
                             size_t room) {
    unicode_init();
    regex_matcher *matcher = regex_matcher_new();
    char *text = malloc(room);
    REQUIRE(matcher != NULL && text != NULL);
    bool *known = known_characters(matcher);
    for (int kind = SCAN_NONE + 1; kind < SCAN_COUNT; kind++)
        for (int n = 0; scan_pattern(kind, n); n++) {
            const char *pattern = scan_pattern(kind, n);
            void *code;
            CHECK_EQ_INT(scan_of_pattern(pattern), kind);
            if (!CHECK_STATUS(regex_compile(pattern, strlen(pattern), &code), ML_OK)) continue;
            long bytes;
            for (int i = 0; (bytes = next(context, i, text)) >= 0; i++) {
                make_valid(known, text, (size_t)bytes);
                compare_pieces(matcher, kind, pattern, code, text, (size_t)bytes);
            }
            regex_free(code);
        }
    regex_matcher_free(matcher);
    free(known);
    free(text);
}

static long next_drawn(void *seed, int round, char *text) {
    if (round == 4000) return -1;
    return (long)(round % 2 ? random_text : block_text)(seed, text, 256);
}

TEST(text, scanners_match_as_expressions) {
    uint64_t seed = 1;
    compare_scanners(next_drawn, &seed, 256);
}

enum { FILE_PART = 1 << 20 };
static long next_read(void *file, int round, char *text) {
    if (round == 0) rewind(file);
    size_t bytes = fread(text, 1, FILE_PART, file);
    return bytes ? (long)bytes : -1;
}

/* The same on a file of any size, named by TEXT. */
TEST(long, scanners_match_on_a_file) {
    const char *path = getenv("TEXT");
    if (!path) test_skip("TEXT names no file");
    FILE *file = fopen(path, "rb");
    REQUIRE(file != NULL);
    compare_scanners(next_read, file, FILE_PART);
    fclose(file);
}

/* ---- Damaged files ----------------------------------------------------------------------------
 */

static void refused(const char *text, const char *why) {
    char path[64];
    ml_tokenizer *t;
    temporary(path);
    write_file(path, text, strlen(text));
    CHECK_STATUS(ml_tokenizer_open(path, &t), ML_INVALID);
    EXPECT(strstr(ml_error_last()->text, why) != NULL, "%s: \"%s\" has no \"%s\"", text,
           ml_error_last()->text, why);
    unlink(path);
}

TEST(text, what_is_not_supported_is_named) {
    refused("", "not a tokenizer that is known");
    refused("{\"a\": }", "is no JSON: line 1");
    refused("{}", "it has no object model");
    refused("{\"model\": {\"type\": \"WordPiece\", \"vocab\": {}}}",
            "type WordPiece is not supported");
#define BPE "{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, \"b\": 1}, \"merges\": []"
    refused(BPE "}, \"pre_tokenizer\": {\"type\": \"UnicodeScripts\"}}",
            "pre-tokenizer UnicodeScripts");
    refused(BPE "}, \"normalizer\": {\"type\": \"Nmt\"}}", "normalizer Nmt");
    refused(BPE "}, \"decoder\": {\"type\": \"CTC\"}}", "decoder CTC");
    refused(BPE "}, \"post_processor\": {\"type\": \"Odd\"}}", "post-processor Odd");
    refused(BPE ", \"dropout\": 0.1}}", "dropout");
    refused(BPE ", \"end_of_word_suffix\": \"</w>\"}}", "end_of_word_suffix");
    refused("{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": [\"a b\"]}}",
            "merge 0 has \"b\", which is not a token");
    refused("{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 99999999}, \"merges\": []}}",
            "the id of the token \"a\"");
    refused(BPE "}, \"pre_tokenizer\": {\"type\": \"Split\", \"pattern\": {\"Regex\": \"(\"}, "
                "\"behavior\": \"Isolated\"}}",
            "regular expression (");
    refused("YQ== 0\nYg== x\n", "line 2 is not a token in base64 and its rank");
    refused("YQ== 0\nYg== 1\n", "2 ranks are of no known vocabulary");
}

/* Files with bytes changed, doubled, cut: opened or refused, and then used. */
static void fuzz(int64_t rounds, uint64_t seed) {
    json_t *all = read_fixture();
    char path[64];
    temporary(path);
    size_t kinds = json_array_size(json_object_get(all, "tokenizers"));
    json_t *vocab = json_object_get(json_object_get(all, "model"), "vocab");
    json_t *merges = json_object_get(json_object_get(all, "model"), "merges"), *value;
    const char *key;
    void *next;
    while (json_array_size(merges) > 20) json_array_remove(merges, 20);
    json_object_foreach_safe(vocab, next, key, value) if (json_integer_value(value) >= 276)
        json_object_del(vocab, key);
    char *texts[64] = {0};
    REQUIRE(kinds <= 64);
    for (size_t k = 0; k < kinds; k++)
        texts[k] = compose(all, json_array_get(json_object_get(all, "tokenizers"), k));
    for (int64_t i = 0; i < rounds; i++) {
        size_t bytes = strlen(texts[i % (int64_t)kinds]);
        char *text = memcpy(malloc(bytes), texts[i % (int64_t)kinds], bytes);
        size_t changes = (size_t)test_range(&seed, 1, 4);
        for (size_t c = 0; c < changes && bytes > 40; c++) {
            size_t at = (size_t)test_range(&seed, 0, (int64_t)bytes - 33);
            size_t from = (size_t)test_range(&seed, 0, (int64_t)bytes - 33);
            switch (test_range(&seed, 0, 3)) {
            case 0: text[at] = (char)test_range(&seed, 1, 255); break;
            case 1: memmove(text + at, text + from, 1 + at % 32); break;
            case 2: text[at] = "0123456789{}[]\",:"[from % 17]; break;
            default:
                memmove(text + at, text + at + 1 + from % 8, bytes - at - 1 - from % 8);
                bytes -= 1 + from % 8;
            }
        }
        write_file(path, text, bytes);
        free(text);
        ml_tokenizer *t;
        ml_status status = ml_tokenizer_open(path, &t);
        EXPECT(status == ML_OK || status == ML_INVALID, "status %d", status);
        if (status != ML_OK) continue;
        char sample[256];
        ml_ids ids = {0};
        ml_bytes back = {0};
        size_t count = random_text(&seed, sample, sizeof sample);
        status = ml_tokenizer_encode(t, sample, count, 0, &ids);
        if (status == ML_OK)
            CHECK_STATUS(ml_tokenizer_decode(t, ids.at, ids.count, 0, &back), ML_OK);
        ml_ids_free(&ids);
        ml_bytes_free(&back);
        ml_tokenizer_close(t);
    }
    for (size_t k = 0; k < kinds; k++) free(texts[k]);
    unlink(path);
    json_decref(all);
}

TEST(text, damaged_files) {
    fuzz(300, 3);
}

/* 1e6 files in parts, which workers share. */
#define FUZZ(part)                                                                                 \
    TEST(long, text_fuzz_##part) {                                                                 \
        if (!getenv("LONG")) test_skip("set LONG=1: minutes");                                     \
        fuzz(125000, 11 + part);                                                                   \
    }
FUZZ(0)
FUZZ(1)
FUZZ(2)
FUZZ(3)
FUZZ(4)
FUZZ(5)
FUZZ(6)
FUZZ(7)

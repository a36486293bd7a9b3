/* tokenizer.json: vocabulary, merges, added tokens. */
#include <string.h>

#include "runtime/text/load.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/unicode.h"

static uint32_t load_id(const json_t *value, const char *token) {
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    if (id < 0 || id >= TEXT_MOST_IDS)
        ml_raise(ML_INVALID, "the id of the token \"%.60s\" must be an integer from 0 to %d", token,
                 TEXT_MOST_IDS - 1);
    return (uint32_t)id;
}

static void load_vocab(ml_tokenizer *t, const json_t *vocab) {
    const char *key;
    json_t *value;
    if (!json_is_object(vocab)) ml_raise(ML_INVALID, "its model has no object vocab");
    json_object_foreach((json_t *)vocab, key, value) {
        uint32_t id = load_id(value, key);
        if (id < t->vocab && t->tokens[id].flags)
            ml_raise(ML_INVALID, "the tokens \"%.60s\" and \"%.60s\" both have the id %u",
                     t->tokens[id].text.at, key, id);
        text_set(t, id, text_copy(t->arena, key, strlen(key)), TOKEN_VOCAB);
    }
}

/* Log probabilities by id; the unknown one's is 10 below the least. */
static void load_unigram(ml_tokenizer *t, const json_t *model) {
    const json_t *vocab = json_object_get(model, "vocab"), *unknown;
    size_t count = json_array_size(vocab);
    if (!json_is_array(vocab) || !count) ml_raise(ML_INVALID, "its model has no array vocab");
    double least = 0;
    t->scores = ML_NEW_ARRAY(t->arena, double, count);
    for (size_t i = 0; i < count; i++) {
        const json_t *pair = json_array_get(vocab, i), *text = json_array_get(pair, 0);
        if (!json_is_string(text) || !json_is_number(json_array_get(pair, 1)))
            ml_raise(ML_INVALID, "entry %zu of its vocab must be [text, number]", i);
        text_set(t, (uint32_t)i,
                 text_copy(t->arena, json_string_value(text), json_string_length(text)),
                 TOKEN_VOCAB);
        double score = json_number_value(json_array_get(pair, 1));
        t->scores[i] = score;
        if (score < least) least = score;
    }
    t->unknown_score = least - 10;
    unknown = json_object_get(model, "unk_id");
    if (unknown && !json_is_null(unknown)) {
        t->unknown = load_id(unknown, "unk_id");
        if (t->unknown >= count) ml_raise(ML_INVALID, "its unk_id %u is not a token", t->unknown);
    }
}

static uint32_t merge_part(const ml_tokenizer *t, const char *at, size_t bytes, size_t row) {
    uint32_t id = text_find(t, &t->by_text, false, at, bytes);
    if (id == TEXT_NO_ID)
        ml_raise(ML_INVALID, "merge %zu has \"%.*s\", which is not a token", row,
                 (int)(bytes < 60 ? bytes : 60), at);
    return id;
}

static void load_merge(ml_tokenizer *t, const json_t *row, size_t rank) {
    text_string left, right;
    if (json_is_string(row)) {
        const char *text = json_string_value(row), *space = strchr(text, ' ');
        if (!space || strchr(space + 1, ' '))
            ml_raise(ML_INVALID, "merge %zu must be two texts, separated by one space", rank);
        left = (text_string){text, (size_t)(space - text)};
        right = (text_string){space + 1, strlen(space + 1)};
    } else {
        const json_t *a = json_array_get(row, 0), *b = json_array_get(row, 1);
        if (!json_is_string(a) || !json_is_string(b) || json_array_size(row) != 2)
            ml_raise(ML_INVALID, "merge %zu must be two texts", rank);
        left = (text_string){json_string_value(a), json_string_length(a)};
        right = (text_string){json_string_value(b), json_string_length(b)};
    }
    char buffer[4096], *joined = buffer; /* a long run of one letter can be one token */
    if (left.bytes + right.bytes > sizeof buffer)
        joined = ML_NEW_ARRAY(t->arena, char, left.bytes + right.bytes);
    memcpy(joined, left.at, left.bytes);
    memcpy(joined + left.bytes, right.at, right.bytes);
    text_add_merge(t, (text_merge){.left = merge_part(t, left.at, left.bytes, rank),
                                   .right = merge_part(t, right.at, right.bytes, rank),
                                   .rank = (uint32_t)rank,
                                   .id = merge_part(t, joined, left.bytes + right.bytes, rank)});
}

static void load_bpe(ml_tokenizer *t, const json_t *model) {
    const json_t *merges = json_object_get(model, "merges"), *dropout;
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++)
        if (load_text(model, affixes[i], "")[0])
            ml_raise(ML_INVALID, "its model's %s is not supported", affixes[i]);
    dropout = json_object_get(model, "dropout");
    if (json_number_value(dropout) != 0) ml_raise(ML_INVALID, "dropout is not supported");
    load_vocab(t, json_object_get(model, "vocab"));
    text_index(t);
    t->whole = load_flag(model, "ignore_merges", false);
    t->fallback = load_flag(model, "byte_fallback", false);
    t->fuse = load_flag(model, "fuse_unk", false);
    const char *unknown = load_text(model, "unk_token", NULL);
    if (unknown) {
        t->unknown = text_find(t, &t->by_text, false, unknown, strlen(unknown));
        if (t->unknown == TEXT_NO_ID)
            ml_raise(ML_INVALID, "its unk_token \"%.60s\" is not a token", unknown);
    }
    if (!json_is_array(merges)) ml_raise(ML_INVALID, "its model has no array merges");
    text_reserve_merges(t, json_array_size(merges));
    for (size_t i = 0; i < json_array_size(merges); i++)
        load_merge(t, json_array_get(merges, i), i);
}

/* Hugging Face's library numbers the tokens that the model does not have on from its own; what the
 * file says must be the same and is not read. */
static void load_added(ml_tokenizer *t, const json_t *list) {
    size_t i;
    json_t *row;
    uint32_t next = 0; /* how many tokens the model has */
    int64_t last = -1; /* the greatest id of an added token */
    for (uint32_t id = 0; id < t->vocab; id++) next += t->tokens[id].flags != 0;
    json_array_foreach((json_t *)list, i, row) {
        const json_t *content = json_object_get(row, "content");
        if (!json_is_string(content))
            ml_raise(ML_INVALID, "added token %zu has no text content", i);
        size_t bytes = json_string_length(content);
        if (!bytes) continue;
        text_string text = text_copy(t->arena, json_string_value(content), bytes);
        uint32_t id = text_find(t, &t->by_text, false, text.at, bytes);
        if (id == TEXT_NO_ID) id = last >= next ? (uint32_t)last + 1 : next;
        if (id > last) last = id;
        bool special = load_flag(row, "special", false);
        unsigned before = id < t->vocab ? t->tokens[id].flags & TOKEN_VOCAB : 0;
        text_set(t, id, text, TOKEN_ADDED | (special ? TOKEN_SPECIAL : 0) | before);
        text_added_set *set =
            load_flag(row, "normalized", !special) ? &t->added_normalized : &t->added;
        *ML_PUSH(t->arena, &set->list) =
            (text_added){.text = text,
                         .id = id,
                         .special = special,
                         .single_word = load_flag(row, "single_word", false),
                         .left = load_flag(row, "lstrip", false),
                         .right = load_flag(row, "rstrip", false)};
    }
    text_index(t);
    load_sort_added(&t->added);
}

/* What the model needs of its tokens' bytes. */
static void load_pieces(ml_tokenizer *t, bool byte_decoder) {
    if (t->whole) t->by_raw = (ml_index){.arena = t->arena};
    t->fallback = t->fallback && !t->byte_level;
    for (int i = 0; i < 256; i++) {
        char text[8];
        size_t bytes = (size_t)text_byte_character((unsigned char)i, text);
        if (!t->byte_level) bytes = (size_t)snprintf(text, sizeof text, "<0x%02X>", i);
        t->byte_id[i] = text_find(t, &t->by_text, false, text, bytes);
    }
    for (uint32_t id = 0; id < t->vocab; id++) {
        text_token *token = &t->tokens[id];
        if (!token->flags) continue;
        text_string raw;
        bool mapped = (t->byte_level || byte_decoder) && text_unmap(t->arena, token->text, &raw);
        if (mapped) token->raw = raw;
        if (t->whole && mapped && token->flags & TOKEN_VOCAB)
            ml_index_add(&t->by_raw, ml_hash(token->raw.at, token->raw.bytes, 0), id);
        if (token->text.bytes > t->longest) t->longest = (uint32_t)token->text.bytes;
    }
}

void load_json(ml_tokenizer *t, const json_t *root) {
    const json_t *model = json_object_get(root, "model"), *decoder;
    if (!json_is_object(model)) ml_raise(ML_INVALID, "it has no object model");
    /* Old files have no type. */
    const char *type = load_text(model, "type", json_object_get(model, "merges") ? "BPE" : "none");
    t->unknown = TEXT_NO_ID;
    if (strcmp(type, "BPE") == 0) {
        t->kind = MODEL_BPE;
        load_bpe(t, model);
    } else if (strcmp(type, "Unigram") == 0) {
        t->kind = MODEL_UNIGRAM;
        load_unigram(t, model);
        t->fallback = load_flag(model, "byte_fallback", false);
        t->fuse = true;
        text_index(t);
        load_sort_tokens(t);
    } else {
        ml_raise(ML_INVALID, "its model of type %s is not supported", type);
    }
    load_added(t, json_object_get(root, "added_tokens"));
    load_steps(t, root);
    if (t->kind == MODEL_BPE && !t->byte_level && !t->whole) load_split_at_spaces(t);
    decoder = json_object_get(root, "decoder");
    load_pieces(t, strcmp(load_text(decoder, "type", ""), "ByteLevel") == 0);
}

static int64_t find_token(const ml_tokenizer *t, const json_t *value) {
    if (json_is_object(value)) value = json_object_get(value, "content");
    if (!json_is_string(value)) return -1;
    uint32_t id =
        text_find(t, &t->by_text, false, json_string_value(value), json_string_length(value));
    return id == TEXT_NO_ID ? -1 : (int64_t)id;
}

void load_ends(ml_tokenizer *t, const json_t *config) {
    static const char *const begins[] = {"<|begin_of_text|>", "<bos>", "<s>",
                                         "<\xEF\xBD\x9C"
                                         "begin\xE2\x96\x81of\xE2\x96\x81sentence"
                                         "\xEF\xBD\x9C>",
                                         NULL};
    static const char *const ends[] = {"<|endoftext|>",
                                       "<|end_of_text|>",
                                       "<eos>",
                                       "</s>",
                                       "<\xEF\xBD\x9C"
                                       "end\xE2\x96\x81of\xE2\x96\x81sentence"
                                       "\xEF\xBD\x9C>",
                                       NULL};
    t->bos = find_token(t, json_object_get(config, "bos_token"));
    t->eos = find_token(t, json_object_get(config, "eos_token"));
    for (int i = 0; t->bos < 0 && begins[i]; i++) t->bos = ml_tokenizer_id(t, begins[i]);
    for (int i = 0; t->eos < 0 && ends[i]; i++) t->eos = ml_tokenizer_id(t, ends[i]);
}

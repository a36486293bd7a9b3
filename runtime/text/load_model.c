/* SentencePiece's .model files: one protobuf message (sentencepiece_model.proto), read by hand. */
#define _GNU_SOURCE /* qsort_r */
#include <stdlib.h>
#include <string.h>

#include "runtime/text/load.h"
#include "runtime/text/regex.h"

typedef struct {
    const unsigned char *at, *end;
} bytes_left;

typedef struct {
    uint32_t number;
    uint64_t value;  /* of an integer, or a float's bits */
    bytes_left text; /* of bytes and messages */
} field;

static uint64_t read_varint(bytes_left *in) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (in->at == in->end) break;
        unsigned char byte = *in->at++;
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) return value;
    }
    ml_raise(ML_INVALID, "an integer in it has no end: it is no SentencePiece model");
}

static void skip(bytes_left *in, uint64_t bytes) {
    if (bytes > (uint64_t)(in->end - in->at))
        ml_raise(ML_INVALID, "a field in it ends behind the file: it is no SentencePiece model");
    in->at += bytes;
}

/* The next field; false at the end. */
static bool read_field(bytes_left *in, field *f) {
    if (in->at == in->end) return false;
    uint64_t key = read_varint(in);
    *f = (field){.number = (uint32_t)(key >> 3)};
    const unsigned char *from;
    switch (key & 7) {
    case 0: f->value = read_varint(in); return true;
    case 1: skip(in, 8); return true;
    case 2:
        f->value = read_varint(in);
        from = in->at;
        skip(in, f->value);
        f->text = (bytes_left){from, in->at};
        return true;
    case 5:
        from = in->at;
        skip(in, 4);
        memcpy(&f->value, from, 4);
        return true;
    }
    ml_raise(ML_INVALID, "a field in it has an unknown type: it is no SentencePiece model");
}

bool load_is_model(const char *text, size_t bytes) {
    return bytes > 2 && text[0] == 0x0A; /* the first piece */
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };
enum { UNIGRAM = 1, MERGES = 2 };

static void load_piece(ml_tokenizer *t, uint32_t id, bytes_left message, double *score) {
    field f;
    text_string text = {"", 0};
    float value = 0;
    unsigned type = NORMAL;
    while (read_field(&message, &f)) {
        if (f.number == 1)
            text = text_copy(t->arena, (const char *)f.text.at, (size_t)(f.text.end - f.text.at));
        if (f.number == 2) memcpy(&value, &f.value, sizeof value);
        if (f.number == 3) type = (unsigned)f.value;
    }
    if (type < NORMAL || type > BYTE) ml_raise(ML_INVALID, "piece %u has the type %u", id, type);
    text_set(t, id, text, type == NORMAL ? TOKEN_VOCAB : 0);
    text_token *token = &t->tokens[id];
    unsigned byte;
    if (type == UNKNOWN) {
        t->unknown = id;
        token->raw = text_copy(t->arena, " \xE2\x81\x87 ", 5);
        token->flags |= TOKEN_SPECIAL;
    } else if (type == CONTROL) {
        token->raw = (text_string){"", 0};
        token->flags |= TOKEN_SPECIAL;
    } else if (type == BYTE && sscanf(text.at, "<0x%2x>", &byte) == 1) {
        token->raw = text_copy(t->arena, (char[]){(char)byte}, 1);
        token->flags |= TOKEN_BYTE;
        t->byte_id[byte] = id;
        t->decoding.fallback = true;
    } else if (type == USER_DEFINED && text.bytes) {
        *ML_PUSH(t->arena, &t->added_normalized.list) = (text_added){.text = text, .id = id};
    }
    *score = type == NORMAL ? (double)value : 0;
}

static int by_score(const void *a, const void *b, void *scores) {
    double x = ((const double *)scores)[*(const uint32_t *)a];
    double y = ((const double *)scores)[*(const uint32_t *)b];
    return (x < y) - (x > y);
}

/* The piece of the highest score is merged first, whatever its two parts: its rank is that of its
 * score. */
static void derive_merges(ml_tokenizer *t) {
    uint32_t *order = ML_NEW_ARRAY(t->arena, uint32_t, t->vocab + 1), count = 0;
    uint32_t *rank = ML_NEW_ARRAY(t->arena, uint32_t, t->vocab + 1);
    for (uint32_t id = 0; id < t->vocab; id++)
        if (t->tokens[id].flags & TOKEN_VOCAB) order[count++] = id;
    qsort_r(order, count, sizeof *order, by_score, t->scores);
    for (uint32_t i = 1; i < count; i++)
        rank[i] = t->scores[order[i]] != t->scores[order[i - 1]] ? i : rank[i - 1];
    text_derive_merges(t, order, count, rank);
}

/* ---- The rest -------------------------------------------------------------------------------- */

static unsigned load_trainer(ml_tokenizer *t, bytes_left message) {
    field f;
    unsigned type = UNIGRAM;
    while (read_field(&message, &f)) {
        if (f.number == 3) type = (unsigned)f.value;
        if (f.number == 35) t->fallback = f.value != 0;
        if (f.number == 24 && f.value)
            ml_raise(ML_INVALID, "its treat_whitespace_as_suffix is not supported");
        if (f.number == 41) t->bos = (int32_t)f.value;
        if (f.number == 42) t->eos = (int32_t)f.value;
    }
    if (type != UNIGRAM && type != MERGES)
        ml_raise(ML_INVALID, "its model_type %u is not supported: unigram and bpe are", type);
    return type;
}

/* The compiled map: the bytes of a double array, it, and the texts that it leads to, each ended by
 * a 0. */
void load_charsmap(ml_tokenizer *t, const char *at, size_t size) {
    uint32_t bytes;
    if (size < 4) ml_raise(ML_INVALID, "its precompiled_charsmap is cut off");
    memcpy(&bytes, at, 4);
    if (bytes > size - 4 || bytes % 4 || bytes < 4)
        ml_raise(ML_INVALID, "its precompiled_charsmap is cut off");
    t->charsmap_units = bytes / 4;
    t->charsmap_trie = (const uint32_t *)ml_arena_copy(t->arena, at + 4, bytes);
    t->charsmap_texts = text_copy(t->arena, at + 4 + bytes, size - 4 - bytes);
    t->charsmap_texts.bytes++; /* the final 0 of the copy */
}

static void load_normalizer(ml_tokenizer *t, bytes_left message) {
    field f;
    bool prefix = true, extra = true, escape = true;
    bytes_left charsmap = {0};
    while (read_field(&message, &f)) {
        if (f.number == 2) charsmap = f.text;
        if (f.number == 3) prefix = f.value != 0;
        if (f.number == 4) extra = f.value != 0;
        if (f.number == 5) escape = f.value != 0;
    }
    if (charsmap.end > charsmap.at)
        load_charsmap(t, (const char *)charsmap.at, (size_t)(charsmap.end - charsmap.at));
    *ML_PUSH(t->arena, &t->normals) =
        (text_normal){.kind = NORMAL_SENTENCEPIECE,
                      .left = prefix,
                      .right = extra,
                      .to = escape ? (text_string){METASPACE, 3} : (text_string){" ", 1}};
    t->decoding.strip = (text_string){" ", 1};
    t->decoding.strip_count = prefix;
}

static void decode_spaces(ml_tokenizer *t) {
    for (uint32_t id = 0; id < t->vocab; id++) {
        text_token *token = &t->tokens[id];
        if (!token->flags || token->flags & (TOKEN_BYTE | TOKEN_SPECIAL)) continue;
        char *text = ml_arena_alloc(t->arena, token->text.bytes + 1);
        size_t bytes = 0;
        for (size_t i = 0; i < token->text.bytes;) {
            bool space =
                i + 3 <= token->text.bytes && memcmp(token->text.at + i, METASPACE, 3) == 0;
            text[bytes++] = space ? ' ' : token->text.at[i];
            i += space ? 3 : 1;
        }
        token->raw = (text_string){text, bytes};
    }
}

void load_model(ml_tokenizer *t, const char *text, size_t bytes) {
    bytes_left all = {(const unsigned char *)text, (const unsigned char *)text + bytes}, in = all;
    bytes_left trainer = {0}, normalizer = {0};
    field f;
    uint32_t count = 0;
    while (read_field(&in, &f)) count += f.number == 1;
    t->unknown = TEXT_NO_ID;
    t->fuse = true;
    t->bos = 1, t->eos = 2; /* unless the trainer says otherwise */
    for (int i = 0; i < 256; i++) t->byte_id[i] = TEXT_NO_ID;
    t->scores = ML_NEW_ARRAY(t->arena, double, count + 1);
    double least = 0;
    count = 0;
    for (in = all; read_field(&in, &f);) {
        if (f.number == 1) {
            load_piece(t, count, f.text, &t->scores[count]);
            if (t->scores[count] < least) least = t->scores[count];
            count++;
        }
        if (f.number == 2) trainer = f.text;
        if (f.number == 3) normalizer = f.text;
    }
    t->unknown_score = (float)(least - 10);
    text_index(t);
    load_sort_added(&t->added_normalized);
    t->kind = load_trainer(t, trainer) == MERGES ? MODEL_BPE : MODEL_UNIGRAM;
    load_normalizer(t, normalizer);
    if (t->bos >= t->vocab) t->bos = -1;
    if (t->eos >= t->vocab) t->eos = -1;
    if (t->bos >= 0) *ML_PUSH(t->arena, &t->before) = (uint32_t)t->bos;
    decode_spaces(t);
    t->rounded = t->kind == MODEL_UNIGRAM;
    if (t->rounded) {
        load_sort_tokens(t);
    } else {
        load_split_at_spaces(t);
        derive_merges(t);
    }
}

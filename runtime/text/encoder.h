/* What one thread needs to encode: internal to runtime/text. */
#ifndef ML_TEXT_ENCODER_H
#define ML_TEXT_ENCODER_H

#include "runtime/text/model.h"
#include "runtime/text/regex.h"

/* A piece of text and its tokens. A short piece stands in `key`, with its length in the last byte;
 * of a longer one there are a hash and where it is among the cache's bytes. */
typedef struct {
    uint64_t key[2];
    uint32_t count;  /* of tokens; 0 with key[1] = 0: empty */
    uint32_t ids[3]; /* or, of more than 3, ids[0]: where they are among the cache's ids */
} cache_entry;

enum {
    CACHE_FIRST = 1 << 12, /* buckets: of two entries, a line of the processor's cache */
    CACHE_MOST = 1 << 18,
    CACHE_SHORT = 15,    /* bytes of a short piece */
    CACHE_LONGEST = 256, /* of any that is kept */
    CACHE_POOL = 1 << 24 /* bytes of longer pieces, and ids: then all is forgotten */
};

enum { STEP_MAPPED = TEXT_MOST_STEPS, STEP_UNMAPPED, STEP_COUNT };

typedef struct {
    size_t begin, end;
    bool match;
} split_part;

/* The likeliest tokens up to here: their score, the last of them and where it begins. */
typedef struct {
    double score;
    uint32_t from, id;
    bool reached;
} unigram_place;

typedef struct ml_encoder {
    const ml_tokenizer *tokenizer;
    int64_t dropped;
    ml_ids *ids;      /* what the text becomes */
    ml_status status; /* of pieces, which are given by call-backs */
    bool first;       /* at the text's beginning: metaspaces are added there */
    cache_entry (*cache)[2];
    uint32_t cache_mask, cache_kept; /* buckets less one; entries since they grew */
    ml_bytes cache_bytes;
    ml_ids cache_ids;
    ml_ids symbols, links; /* of a piece that is merged */
    uint32_t *by_rank;     /* three of each rank: of long pieces */
    uint64_t *entries;
    size_t entry_room;
    unigram_place *best; /* unigram: of each place between two bytes */
    size_t best_room;
    regex_matcher *matcher;
    ml_bytes valid; /* the text, U+FFFD for bytes that are no UTF-8 */
    ml_bytes normal[2];
    ml_bytes step[STEP_COUNT]; /* of each split that changes the text */
    struct {
        split_part *at;
        size_t count, room;
    } parts[TEXT_MOST_STEPS];
} ml_encoder;

/* Part a text as the pre-tokenizer says and append the tokens of its pieces. */
void split_text(ml_encoder *encoder, const char *text, size_t bytes);
/* Append the tokens of a piece, and of all that a scanner finds; SCAN_NONE: the text is one. */
void piece_encode(ml_encoder *encoder, const char *piece, size_t bytes);
void piece_scan(ml_encoder *encoder, scan_kind kind, const char *text, size_t bytes);
/* An empty cache of that many buckets, a power of two, or the old entries in more; false where
 * memory is exhausted. */
bool piece_open_cache(ml_encoder *encoder, uint32_t buckets);
/* Tokens of a piece in encoder->symbols: by merges, and the likeliest ones. */
ml_status bpe_symbols(ml_encoder *encoder, const char *piece, size_t bytes);
ml_status unigram_symbols(ml_encoder *encoder, const char *piece, size_t bytes);
/* Append the tokens of a character without one: bytes, unknown or none. */
ml_status unknown_character(ml_encoder *encoder, ml_ids *to, const char *character, int bytes,
                            bool *unknown);

#endif

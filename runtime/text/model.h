/* What a tokenizer is made of: internal to runtime/text. Loaders fill it, encoders read it. */
#ifndef ML_TEXT_MODEL_H
#define ML_TEXT_MODEL_H

#include "runtime/base/memory.h"
#include "runtime/text/buffer.h"
#include "runtime/text/scan.h"

enum { TEXT_NO_ID = UINT32_MAX, TEXT_MOST_IDS = 1 << 24, TEXT_MOST_STEPS = 32 };

typedef struct {
    const char *at;
    size_t bytes;
} text_string;

/* VOCAB: the model makes it too; BYTE: it stands for one, "<0x0A>". */
enum { TOKEN_KNOWN = 1, TOKEN_SPECIAL = 2, TOKEN_ADDED = 4, TOKEN_VOCAB = 8, TOKEN_BYTE = 16 };
typedef struct {
    text_string text, raw; /* as the file has it; what it decodes to */
    unsigned flags;
} text_token;

/* A token that is found in the text before anything else. */
typedef struct {
    text_string text; /* normalized where it is found in normalized text */
    uint32_t id;
    bool special, single_word, left, right; /* left, right: takes the spaces there too */
} text_added;

typedef struct {
    ML_VEC(text_added) list; /* sorted by text */
    bool first[256];         /* bytes that a text of the list begins with */
    int only;                /* the one such byte, or -1 */
} text_added_set;

typedef struct {
    uint32_t left, right, rank, id; /* id TEXT_NO_ID: an empty slot */
} text_merge;

/* A regular expression (regex.h), or a fixed text. */
typedef struct {
    void *code; /* NULL: the text */
    text_string text;
} text_pattern;

typedef enum {
    NORMAL_NFC,
    NORMAL_NFD,
    NORMAL_NFKC,
    NORMAL_NFKD,
    NORMAL_LOWERCASE,
    NORMAL_STRIP,
    NORMAL_ACCENTS, /* marks left out */
    NORMAL_REPLACE,
    NORMAL_PREPEND,
    NORMAL_SENTENCEPIECE, /* left: a space is prepended; right: spaces in excess removed */
    NORMAL_PRECOMPILED    /* its table as Hugging Face's library applies it */
} text_normal_kind;
typedef struct {
    text_normal_kind kind;
    text_pattern from;
    text_string to;
    bool left, right;
} text_normal;

typedef enum {
    SPLIT_SCAN,
    SPLIT_PATTERN,
    SPLIT_NUMBERS, /* each character of the class */
    SPLIT_PUNCTUATION,
    SPLIT_SPACES,
    SPLIT_BYTES,    /* ByteLevel: bytes become its characters where a later step asks */
    SPLIT_METASPACE /* spaces become the text `to` */
} text_split_kind;
typedef enum {
    PIECE_ISOLATED,
    PIECE_REMOVED,
    PIECE_CONTIGUOUS,
    PIECE_WITH_PREVIOUS,
    PIECE_WITH_NEXT
} text_behavior;
typedef enum { PREFIX_NEVER, PREFIX_FIRST, PREFIX_ALWAYS } text_prefix;
typedef struct {
    text_split_kind kind;
    scan_kind scan;
    text_pattern pattern;
    text_behavior behavior;
    bool invert;
    text_prefix prefix; /* a space, or the metaspace, before the text */
    text_string to;
    bool pieces; /* of a metaspace: split at it */
} text_split;

/* What decoding does to the texts of tokens, beyond text_token.raw. */
typedef struct {
    bool spaced;         /* joined by spaces: no decoder */
    bool fallback;       /* TOKEN_BYTE are bytes */
    bool no_leading;     /* the first token loses its metaspaces */
    text_string strip;   /* what is removed at the start, */
    int64_t strip_count; /* up to that many times */
    text_string space;   /* the metaspace */
} text_decoding;

typedef enum { MODEL_BYTES, MODEL_BPE, MODEL_UNIGRAM } text_model_kind;

typedef struct ml_tokenizer {
    ml_arena *arena; /* of all below */
    const char *name;
    uint64_t hash;
    int64_t vocab, bos, eos;
    text_model_kind kind;
    text_token *tokens; /* vocab */
    ml_index by_text;
    text_added_set added, added_normalized;
    ML_VEC(text_normal) normals;
    ML_VEC(text_split) splits;
    text_decoding decoding;
    ML_VEC(uint32_t) before, after; /* the frame */
    ML_VEC(void *) codes;           /* compiled expressions, freed at the end */

    bool byte_level; /* tokens are of bytes, each written as a character */
    bool mapped;     /* a split works on those characters: bytes are mapped before, back after */
    bool whole;      /* a piece that is a token is that token: ignore_merges, tiktoken */
    bool fallback,
        fuse;         /* characters without a token are those of their bytes; unknown runs join */
    uint32_t unknown; /* or TEXT_NO_ID */
    uint32_t byte_id[256]; /* byte_level: of one byte; else of "<0x0A>" */
    ml_index by_raw;       /* whole: tokens by their bytes */
    text_merge *merges;
    uint32_t merge_mask, ranks; /* ranks: all are below it */
    uint64_t *byte_pairs; /* of two bytes' merge: rank, id; UINT64_MAX: none. NULL: not known */
    double *scores;       /* unigram: log probabilities, of the model's tokens */
    double unknown_score;
    bool rounded;     /* sums of scores are floats, as SentencePiece's: of near ties they decide */
    uint32_t *sorted; /* unigram: the model's tokens by their bytes */
    uint32_t sorted_count;
    uint32_t longest;              /* bytes of the longest token */
    const uint32_t *charsmap_trie; /* a double array */
    size_t charsmap_units;
    text_string charsmap_texts;
} ml_tokenizer;

static inline bool text_is(text_string a, const char *at, size_t bytes) {
    return a.bytes == bytes && __builtin_memcmp(a.at, at, bytes) == 0;
}
text_string text_copy(ml_arena *arena, const char *at, size_t bytes);
/* The id of a token by its text, or TEXT_NO_ID. */
uint32_t text_find(const ml_tokenizer *tokenizer, const ml_index *index, bool raw, const char *at,
                   size_t bytes);
/* The longest added token that the text begins with, or NULL. */
const text_added *text_find_added(const text_added_set *set, const char *text, size_t bytes);
/* Set a token (raises where the id is too large); later ones replace earlier ones. */
void text_set(ml_tokenizer *tokenizer, uint32_t id, text_string text, unsigned flags);
/* Index the tokens that are known by their texts. */
void text_index(ml_tokenizer *tokenizer);
/* Room for that many merges; add one, replacing an earlier one of the pair; find one or NULL. */
void text_reserve_merges(ml_tokenizer *tokenizer, size_t count);
void text_add_merge(ml_tokenizer *tokenizer, text_merge merge);
/* Make a merge of any two tokens that together are one of order[0..count-1] (NULL: of the ids
 * themselves), with its rank (NULL: its place there). */
void text_derive_merges(ml_tokenizer *tokenizer, const uint32_t *order, uint32_t count,
                        const uint32_t *rank);
static inline const text_merge *text_find_merge(const ml_tokenizer *t, uint32_t left,
                                                uint32_t right) {
    uint64_t key = (uint64_t)left << 32 | right;
    uint32_t at = (uint32_t)((key * 0x9E3779B97F4A7C15) >> 32) & t->merge_mask;
    for (;; at = (at + 1) & t->merge_mask) {
        const text_merge *merge = &t->merges[at];
        if (merge->left == left && merge->right == right)
            return merge->id == TEXT_NO_ID ? 0 : merge;
        if (merge->id == TEXT_NO_ID) return 0;
    }
}

void bpe_prepare(ml_tokenizer *tokenizer); /* once all merges are there */

/* GPT-2's alphabet: the character of a byte (UTF-8, written to `to`), and back; -1: none. */
int text_byte_character(unsigned char byte, char to[4]);
int text_character_byte(uint32_t character);
/* Bytes of a text of such characters; false where one is none. */
bool text_unmap(ml_arena *arena, text_string text, text_string *raw);

#endif

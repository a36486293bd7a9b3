#include "runtime/text/train.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/text/model.h"
#include "runtime/text/unicode.h"

enum { LONGEST = 256, LEAST = 257 + 1, LEAST_COUNT = 2 };

/* ---- Words ----------------------------------------------------------------------------------- */

typedef struct {
    size_t at; /* of its bytes */
    uint32_t bytes, hash;
    int64_t count; /* 0: an empty slot */
} word;

struct ml_words {
    word *slots;
    size_t capacity, count;
    ml_bytes bytes;
    ml_status status;
};

static ml_status exhausted(void) {
    return ml_fail(ML_NO_MEMORY, "not enough host memory to train a tokenizer");
}

ml_status ml_words_open(ml_words **words) {
    unicode_init();
    *words = ml_alloc(sizeof **words);
    if (*words) (*words)->slots = ml_alloc(((*words)->capacity = 1024) * sizeof(word));
    if (*words && (*words)->slots) return ML_OK;
    ml_free(*words);
    *words = NULL;
    return exhausted();
}

void ml_words_close(ml_words *w) {
    if (!w) return;
    ml_free(w->slots);
    ml_bytes_free(&w->bytes);
    ml_free(w);
}

static ml_status grow_words(ml_words *w) {
    word *more = ml_alloc(2 * w->capacity * sizeof *more);
    if (!more) return exhausted();
    size_t mask = 2 * w->capacity - 1;
    for (size_t i = 0; i < w->capacity; i++) {
        if (!w->slots[i].count) continue;
        size_t at = w->slots[i].hash & mask;
        while (more[at].count) at = (at + 1) & mask;
        more[at] = w->slots[i];
    }
    ml_free(w->slots);
    w->slots = more;
    w->capacity *= 2;
    return ML_OK;
}

static ml_status add_word(ml_words *w, const char *piece, size_t bytes, int64_t count) {
    if (2 * w->count >= w->capacity) ML_TRY(grow_words(w));
    uint32_t hash = (uint32_t)ml_hash(piece, bytes, 0);
    size_t at = hash & (w->capacity - 1);
    for (; w->slots[at].count; at = (at + 1) & (w->capacity - 1)) {
        word *known = &w->slots[at];
        if (known->hash != hash || known->bytes != bytes ||
            memcmp(w->bytes.at + known->at, piece, bytes) != 0)
            continue;
        known->count += count;
        return ML_OK;
    }
    w->slots[at] = (word){w->bytes.count, (uint32_t)bytes, hash, count};
    w->count++;
    return ml_bytes_add(&w->bytes, piece, bytes);
}

static void count_piece(void *context, const char *piece, size_t bytes) {
    ml_words *w = context;
    if (bytes > 1 && bytes <= LONGEST && w->status == ML_OK)
        w->status = add_word(w, piece, bytes, 1);
}

ml_status ml_words_add(ml_words *w, const char *text, size_t bytes) {
    w->status = ML_OK;
    scan_text(SCAN_LLAMA3, text, bytes, count_piece, w);
    return w->status;
}

ml_status ml_words_merge(ml_words *w, const ml_words *more) {
    for (size_t i = 0; i < more->capacity; i++)
        if (more->slots[i].count)
            ML_TRY(add_word(w, more->bytes.at + more->slots[i].at, more->slots[i].bytes,
                            more->slots[i].count));
    return ML_OK;
}

int64_t ml_words_count(const ml_words *w) {
    return (int64_t)w->count;
}

/* ---- Merges ---------------------------------------------------------------------------------- */

typedef struct {
    uint32_t left, right;
    bool used;    /* not an empty slot */
    bool changed; /* in this merge its count grew */
    int64_t count;
    ml_ids words; /* in which it was seen; a word may stand twice, or have it no more */
} pair;

typedef struct {
    int64_t count;
    uint32_t left, right;
} candidate;

typedef struct {
    const ml_words *words;
    uint32_t *symbols; /* of all words, each at its own place */
    size_t *at;        /* [words] */
    uint32_t *length;  /* [words] */
    int64_t *count;    /* [words] */
    size_t word_count;
    pair *pairs; /* open addressing */
    size_t pair_capacity, pair_count;
    candidate *heap;
    size_t heaped, heap_room;
    ml_ids changed; /* pairs (two ids each) whose count grew in this merge */
    ml_bytes texts; /* of tokens */
    size_t *text_at;
    uint32_t *merged; /* two ids a merge */
    int64_t tokens;
} training;

static size_t find_pair(const training *t, uint32_t left, uint32_t right) {
    uint64_t key = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15;
    size_t mask = t->pair_capacity - 1, at = (size_t)(key >> 20) & mask;
    while (t->pairs[at].used && (t->pairs[at].left != left || t->pairs[at].right != right))
        at = (at + 1) & mask;
    return at;
}

static ml_status grow_pairs(training *t) {
    pair *old = t->pairs;
    size_t capacity = t->pair_capacity;
    t->pair_capacity = capacity ? 2 * capacity : 1024;
    t->pairs = ml_alloc(t->pair_capacity * sizeof *t->pairs);
    if (!t->pairs) {
        t->pairs = old;
        t->pair_capacity = capacity;
        return exhausted();
    }
    for (size_t i = 0; i < capacity; i++)
        if (old[i].used) t->pairs[find_pair(t, old[i].left, old[i].right)] = old[i];
    ml_free(old);
    return ML_OK;
}

static ml_status count_pair(training *t, uint32_t left, uint32_t right, size_t word,
                            int64_t count) {
    if (2 * t->pair_count >= t->pair_capacity) ML_TRY(grow_pairs(t));
    pair *p = &t->pairs[find_pair(t, left, right)];
    if (!p->used) {
        *p = (pair){left, right, .used = true};
        t->pair_count++;
    }
    p->count += count;
    if (count < 0) return ML_OK;
    if (!p->words.count || p->words.at[p->words.count - 1] != word)
        ML_TRY(ml_ids_add(&p->words, (uint32_t)word));
    if (p->changed) return ML_OK;
    p->changed = true;
    ML_TRY(ml_ids_add(&t->changed, left));
    return ml_ids_add(&t->changed, right);
}

/* The most frequent first; of one count the least ids. */
static bool is_before(const candidate *a, const candidate *b) {
    if (a->count != b->count) return a->count > b->count;
    return a->left != b->left ? a->left < b->left : a->right < b->right;
}

static ml_status push(training *t, candidate c) {
    if (t->heaped == t->heap_room) {
        size_t room = t->heap_room ? 2 * t->heap_room : 1024;
        candidate *more = ml_realloc(t->heap, t->heap_room * sizeof c, room * sizeof c);
        if (!more) return exhausted();
        t->heap = more;
        t->heap_room = room;
    }
    size_t at = t->heaped++;
    for (; at && is_before(&c, &t->heap[(at - 1) / 2]); at = (at - 1) / 2)
        t->heap[at] = t->heap[(at - 1) / 2];
    t->heap[at] = c;
    return ML_OK;
}

static candidate pop(training *t) {
    candidate best = t->heap[0], last = t->heap[--t->heaped];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < t->heaped) {
        if (child + 1 < t->heaped && is_before(&t->heap[child + 1], &t->heap[child])) child++;
        if (!is_before(&t->heap[child], &last)) break;
        t->heap[at] = t->heap[child];
        at = child;
    }
    t->heap[at] = last;
    return best;
}

/* Pairs whose counts grew are candidates by their new counts. */
static ml_status push_changed(training *t) {
    for (int64_t i = 0; i < t->changed.count; i += 2) {
        pair *p = &t->pairs[find_pair(t, t->changed.at[i], t->changed.at[i + 1])];
        p->changed = false;
        ML_TRY(push(t, (candidate){p->count, p->left, p->right}));
    }
    t->changed.count = 0;
    return ML_OK;
}

static ml_status merge_in_word(training *t, size_t word, uint32_t left, uint32_t right,
                               uint32_t id) {
    uint32_t *s = t->symbols + t->at[word], n = t->length[word], to = 0;
    int64_t count = t->count[word];
    for (uint32_t i = 0; i < n; i++) {
        if (i + 1 == n || s[i] != left || s[i + 1] != right) {
            s[to++] = s[i];
            continue;
        }
        if (to) {
            ML_TRY(count_pair(t, s[to - 1], left, word, -count));
            ML_TRY(count_pair(t, s[to - 1], id, word, count));
        }
        if (i + 2 < n) {
            ML_TRY(count_pair(t, right, s[i + 2], word, -count));
            ML_TRY(count_pair(t, id, s[i + 2], word, count));
        }
        s[to++] = id;
        i++;
    }
    t->length[word] = to;
    return ML_OK;
}

static ml_status merge_next(training *t, ml_train_sink *sink, void *context, bool *done) {
    candidate best = {0};
    pair *p = NULL;
    for (*done = true; t->heaped && *done;) {
        best = pop(t);
        p = &t->pairs[find_pair(t, best.left, best.right)];
        if (p->count != best.count && p->count >= LEAST_COUNT)
            ML_TRY(push(t, (candidate){p->count, best.left, best.right}));
        *done = p->count != best.count || best.count < LEAST_COUNT;
    }
    if (*done) return ML_OK;
    uint32_t id = (uint32_t)t->tokens;
    ml_ids words = p->words;
    p->words = (ml_ids){0};
    p->count = 0;
    ml_status status = ML_OK;
    for (int64_t i = 0; i < words.count && status == ML_OK; i++)
        status = merge_in_word(t, words.at[i], best.left, best.right, id);
    ml_ids_free(&words);
    ML_TRY(status);
    /* The pair may have been counted again where it overlapped itself: it is no more. */
    t->pairs[find_pair(t, best.left, best.right)].count = 0;
    t->merged[2 * (id - 256)] = best.left;
    t->merged[2 * (id - 256) + 1] = best.right;
    size_t left = t->text_at[best.left + 1] - t->text_at[best.left];
    size_t right = t->text_at[best.right + 1] - t->text_at[best.right];
    ML_TRY(ml_bytes_reserve(&t->texts, left + right));
    ML_TRY(ml_bytes_add(&t->texts, t->texts.at + t->text_at[best.left], left));
    ML_TRY(ml_bytes_add(&t->texts, t->texts.at + t->text_at[best.right], right));
    t->text_at[++t->tokens] = t->texts.count;
    if (sink) ML_TRY(sink(context, t->texts.at + t->text_at[id], left + right, best.count));
    return push_changed(t);
}

/* Bytes are numbered by the characters that they are written as, in order. */
static uint32_t byte_ids[256];

static int by_character(const void *a, const void *b) {
    char x[5] = {0}, y[5] = {0};
    text_byte_character(*(const unsigned char *)a, x);
    text_byte_character(*(const unsigned char *)b, y);
    return strcmp(x, y);
}

static ml_status start(training *t, int64_t vocab) {
    unsigned char order[256];
    for (int i = 0; i < 256; i++) order[i] = (unsigned char)i;
    qsort(order, 256, 1, by_character);
    t->word_count = t->words->count;
    t->symbols = ml_alloc((t->words->bytes.count + 1) * sizeof *t->symbols);
    t->at = ml_alloc((t->word_count + 1) * sizeof *t->at);
    t->length = ml_alloc((t->word_count + 1) * sizeof *t->length);
    t->count = ml_alloc((t->word_count + 1) * sizeof *t->count);
    t->text_at = ml_alloc((size_t)(vocab + 2) * sizeof *t->text_at);
    t->merged = ml_alloc((size_t)vocab * 2 * sizeof *t->merged);
    if (!t->symbols || !t->at || !t->length || !t->count || !t->text_at || !t->merged)
        return exhausted();
    for (int i = 0; i < 256; i++) {
        byte_ids[order[i]] = (uint32_t)i;
        ML_TRY(ml_bytes_add(&t->texts, &order[i], 1));
        t->text_at[++t->tokens] = t->texts.count;
    }
    size_t n = 0, at = 0;
    for (size_t i = 0; i < t->words->capacity; i++) {
        const word *w = &t->words->slots[i];
        if (!w->count) continue;
        t->at[n] = at;
        t->length[n] = w->bytes;
        t->count[n] = w->count;
        for (uint32_t k = 0; k < w->bytes; k++)
            t->symbols[at++] = byte_ids[(unsigned char)t->words->bytes.at[w->at + k]];
        for (uint32_t k = 0; k + 1 < w->bytes; k++)
            ML_TRY(
                count_pair(t, t->symbols[t->at[n] + k], t->symbols[t->at[n] + k + 1], n, w->count));
        n++;
    }
    return push_changed(t);
}

/* ---- The file -------------------------------------------------------------------------------- */

/* A token's bytes as characters that need no more than JSON's own escapes; 0-terminated. */
static ml_status written(const training *t, uint32_t id, ml_bytes *to) {
    to->count = 0;
    for (size_t i = t->text_at[id]; i < t->text_at[id + 1]; i++) {
        char text[4];
        int length = text_byte_character((unsigned char)t->texts.at[i], text);
        ML_TRY(ml_bytes_add(to, text, (size_t)length));
    }
    return ml_bytes_add(to, "", 1);
}

static json_t *describe(const training *t, ml_bytes *text) {
    json_t *vocab = json_object(), *merges = json_array();
    for (int64_t id = 0; id < t->tokens; id++)
        if (written(t, (uint32_t)id, text) == ML_OK)
            json_object_set_new(vocab, text->at, json_integer(id));
    for (int64_t i = 256; i < t->tokens; i++) {
        json_t *row = json_array();
        for (int k = 0; k < 2; k++)
            if (written(t, t->merged[2 * (i - 256) + k], text) == ML_OK)
                json_array_append_new(row, json_string(text->at));
        json_array_append_new(merges, row);
    }
    return json_pack(
        "{s:s, s:n, s:n, s:[{s:I, s:s, s:b, s:b, s:b, s:b, s:b}], s:n,"
        " s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b, s:b}]}, s:n,"
        " s:{s:s, s:b, s:b, s:b}, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}}",
        "version", "1.0", "truncation", "padding", "added_tokens", "id", (json_int_t)t->tokens,
        "content", "<|endoftext|>", "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0,
        "special", 1, "normalizer", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type",
        "Split", "pattern", "Regex", scan_pattern(SCAN_LLAMA3, 0), "behavior", "Isolated", "invert",
        0, "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0,
        "post_processor", "decoder", "type", "ByteLevel", "add_prefix_space", 1, "trim_offsets", 1,
        "use_regex", 1, "model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix",
        "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab,
        "merges", merges);
}

static ml_status write_json(const training *t, ml_bytes *json) {
    ml_bytes text = {0};
    json_t *root = describe(t, &text);
    char *dumped = root ? json_dumps(root, JSON_INDENT(1)) : NULL;
    ml_status status = dumped ? ml_bytes_add(json, dumped, strlen(dumped)) : exhausted();
    if (status == ML_OK) status = ml_bytes_add(json, "\n", 1);
    free(dumped);
    json_decref(root);
    ml_bytes_free(&text);
    return status;
}

ml_status ml_train(const ml_words *words, int64_t vocab, ml_train_sink *sink, void *context,
                   ml_bytes *json, int64_t *made) {
    training t = {.words = words};
    if (vocab < LEAST || vocab > TEXT_MOST_IDS)
        return ml_fail(ML_INVALID, "a trained tokenizer has %d to %d tokens, not %lld", LEAST,
                       TEXT_MOST_IDS, (long long)vocab);
    ml_status status = start(&t, vocab);
    for (bool done = false; status == ML_OK && !done && t.tokens < vocab - 1;)
        status = merge_next(&t, sink, context, &done);
    if (status == ML_OK) status = write_json(&t, json);
    *made = t.tokens + 1;
    for (size_t i = 0; i < t.pair_capacity; i++) ml_ids_free(&t.pairs[i].words);
    void *blocks[] = {t.symbols, t.at, t.length, t.count, t.pairs, t.heap, t.text_at, t.merged};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) ml_free(blocks[i]);
    ml_ids_free(&t.changed);
    ml_bytes_free(&t.texts);
    return status;
}

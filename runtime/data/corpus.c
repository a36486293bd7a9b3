#include "runtime/data/corpus.h"

#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "runtime/base/memory.h"
#include "runtime/data/cache.h"
#include "runtime/data/order.h"
#include "runtime/data/spec.h"
#include "runtime/data/store.h"
#include "runtime/data/text.h"

typedef struct {
    const char *name;
    ML_VEC(store) stores;
    int64_t *begins; /* [stores + 1]: tokens before each store */
} source;

struct ml_corpus {
    ml_arena *arena;
    ml_tokenizer *tokenizer;
    const char *name;
    source *sources;
    int count;
    data_blend blend;
    int64_t open_files, most_files;
};

/* ---- Opening --------------------------------------------------------------------------------- */

typedef struct {
    ml_corpus *corpus;
    const char *spec;
    ml_corpus_kind kind;
    bool made; /* tokens of text are not made */
} opening;

static void close_until_read(ml_corpus *c, ml_file *file) {
    if (!file->path) return;
    char *path = ml_arena_copy(c->arena, file->path, strlen(file->path));
    int64_t bytes = file->bytes;
    ml_file_close(file);
    *file = (ml_file){path, -1, bytes};
}

/* Beyond a quarter of the files that a process may have open (there are data of evaluations, too),
 * they are opened for each read. */
static void limit_open_files(ml_corpus *c, store *s) {
    int64_t wanted = s->index.path ? 2 : 1;
    bool reopen = c->open_files + wanted > c->most_files;
    c->open_files += reopen ? 0 : wanted;
    if (!reopen) return;
    close_until_read(c, &s->file);
    close_until_read(c, &s->index);
    s->reopen = true;
}

static void open_store(const opening *o, const char *path, store *s) {
    ml_corpus *c = o->corpus;
    const ml_corpus_kind kind = o->kind;
    char cached[PATH_MAX];
    enum { LOOKED_AT = 8 }; /* stores whose content is checked: others have the same writer */
    bool text = !store_ends_in(path, ".bin") && !store_ends_in(path, ".npy");
    ml_tokenizer *bytes = NULL;
    bool plain = kind != ML_CORPUS_BY_NAME || !text || text_is_plain(path);
    bool direct = plain && (kind != ML_CORPUS_BY_NAME || !text || !c->tokenizer),
         look = c->open_files < LOOKED_AT;
    ml_status status = plain ? store_open(path, (store_kind)kind, look, s) : ML_OK;
    if (status == ML_OK && !direct) store_close(s);
    if (!direct && !c->tokenizer) status = ml_tokenizer_open("bytes", &bytes);
    if (status == ML_OK && !direct)
        status = (o->made ? cache_find : cache_tokens)(path, bytes ? bytes : c->tokenizer, cached,
                                                       sizeof cached);
    if (status == ML_OK && !direct) {
        status = store_open(cached, STORE_BY_NAME, false, s);
        if (status != ML_OK) ml_help("it is made anew from %s where it is removed", path);
    }
    if (bytes) ml_tokenizer_close(bytes);
    if (status == ML_OK && !direct) s->origin = path;
    if (status == ML_OK && s->width > 1 && s->separator < 0 && c->tokenizer)
        s->separator = ml_tokenizer_eos(c->tokenizer);
    if (status != ML_OK) ml_raise_last();
    limit_open_files(c, s);
}

static void add_up(ml_corpus *c, source *s) {
    s->begins = ML_NEW_ARRAY(c->arena, int64_t, s->stores.count + 1);
    for (uint32_t i = 0; i < s->stores.count; i++)
        s->begins[i + 1] = s->begins[i] + s->stores.at[i].tokens;
}

static void open_sources(void *context) {
    opening *o = context;
    ml_corpus *c = o->corpus;
    spec parsed = {0};
    struct rlimit files = {0};
    c->name = ml_arena_copy(c->arena, o->spec, strlen(o->spec));
    c->most_files = getrlimit(RLIMIT_NOFILE, &files) == 0 ? (int64_t)(files.rlim_cur / 4) : 256;
    spec_parse(c->arena, o->spec, &parsed);
    c->sources = ML_NEW_ARRAY(c->arena, source, parsed.count);
    double *weights = ML_NEW_ARRAY(c->arena, double, parsed.count);
    for (uint32_t i = 0; i < parsed.count; i++) {
        source *s = &c->sources[c->count++];
        s->name = parsed.at[i].text, weights[i] = parsed.at[i].weight;
        for (uint32_t k = 0; k < parsed.at[i].files.count; k++) {
            store *next = ML_PUSH(c->arena, &s->stores);
            next->file.descriptor = next->index.descriptor = -1;
            open_store(o, parsed.at[i].files.at[k], next);
        }
        add_up(c, s);
    }
    blend_make(c->arena, weights, c->count, &c->blend);
}

static ml_status make(ml_tokenizer *tokenizer, ml_corpus **result) {
    ml_corpus *c = *result = ml_alloc(sizeof *c);
    if (c) c->arena = ml_arena_new();
    if (c && c->arena) {
        c->tokenizer = tokenizer;
        return ML_OK;
    }
    ml_free(c);
    ml_tokenizer_close(tokenizer);
    *result = NULL;
    return ml_fail(ML_NO_MEMORY, "not enough host memory to open data");
}

static ml_status made(ml_status status, ml_corpus **result) {
    if (status == ML_OK) return ML_OK;
    ml_corpus_close(*result);
    *result = NULL;
    return status;
}

ml_status ml_corpus_open(const char *text, ml_corpus_kind kind, ml_tokenizer *tokenizer,
                         ml_corpus **result) {
    ML_TRY(make(tokenizer, result));
    return made(ml_protect(open_sources, &(opening){*result, text, kind, false}), result);
}

ml_status ml_corpus_open_made(const char *text, ml_tokenizer *tokenizer, ml_corpus **result) {
    ML_TRY(make(tokenizer, result));
    return made(ml_protect(open_sources, &(opening){*result, text, ML_CORPUS_BY_NAME, true}),
                result);
}

typedef struct {
    ml_corpus *corpus;
    const char *name;
    const void *data;
    size_t size;
} memory;

static void open_memory(void *context) {
    const memory *m = context;
    ml_corpus *c = m->corpus;
    const double weight = 1;
    c->name = ml_arena_copy(c->arena, m->name, strlen(m->name));
    c->sources = ML_NEW(c->arena, source);
    c->sources->name = c->name;
    store *s = ML_PUSH(c->arena, &c->sources->stores);
    c->count = 1;
    *s = (store){
        .memory = m->data, .width = 1, .tokens = (int64_t)m->size, .documents = 1, .separator = -1};
    s->file.descriptor = s->index.descriptor = -1;
    add_up(c, c->sources);
    blend_make(c->arena, &weight, 1, &c->blend);
}

ml_status ml_corpus_from_memory(const char *name, const void *data, size_t size,
                                ml_corpus **result) {
    ML_TRY(make(NULL, result));
    return made(ml_protect(open_memory, &(memory){*result, name, data, size}), result);
}

void ml_corpus_close(ml_corpus *c) {
    if (!c) return;
    for (int i = 0; i < c->count; i++)
        for (uint32_t k = 0; k < c->sources[i].stores.count; k++) {
            store *s = &c->sources[i].stores.at[k];
            if (!s->reopen) store_close(s);
        }
    ml_tokenizer_close(c->tokenizer);
    ml_arena_free(c->arena);
    ml_free(c);
}

/* ---- What it holds --------------------------------------------------------------------------- */

static const store *next_store(const ml_corpus *c, int *source_at, uint32_t *at) {
    while (*source_at < c->count && *at >= c->sources[*source_at].stores.count)
        ++*source_at, *at = 0;
    return *source_at < c->count ? &c->sources[*source_at].stores.at[(*at)++] : NULL;
}
#define EACH_STORE(c, s)                                                                           \
    int source_ = 0;                                                                               \
    uint32_t store_ = 0;                                                                           \
    for (const store *s; (s = next_store(c, &source_, &store_));)

int64_t ml_corpus_tokens(const ml_corpus *c) {
    int64_t tokens = 0;
    EACH_STORE(c, s) tokens += s->tokens;
    return tokens;
}

int64_t ml_corpus_documents(const ml_corpus *c) {
    int64_t documents = 0;
    EACH_STORE(c, s) documents += s->documents ? s->documents : s->sequences;
    return documents;
}

bool ml_corpus_is_bytes(const ml_corpus *c) {
    EACH_STORE(c, s) {
        if (s->width != 1) return false;
    }
    return true;
}

const char *ml_corpus_name(const ml_corpus *c) {
    return c->name;
}

const ml_tokenizer *ml_corpus_tokenizer(const ml_corpus *c) {
    return c->tokenizer;
}

/* ---- Identity -------------------------------------------------------------------------------- */

/* Of the first and the last block and two between. */
static ml_status hash_store(const store *s, uint64_t *hash) {
    enum { BLOCKS = 4, TOKENS = 1024 };
    int32_t tokens[TOKENS];
    *hash = (uint64_t)s->tokens;
    for (int i = 0; i < BLOCKS; i++) {
        int64_t count = s->tokens < TOKENS ? s->tokens : TOKENS;
        ML_TRY(store_read(s, (s->tokens - count) / (BLOCKS - 1) * i, count, tokens));
        *hash = ml_hash(tokens, (size_t)count * sizeof *tokens, *hash);
    }
    return ML_OK;
}

static ml_status add_store(const store *s, const char *name, json_t *files) {
    char digits[32];
    uint64_t hash;
    const char *path = s->origin ? s->origin : s->file.path ? s->file.path : name;
    const char *slash = strrchr(path, '/');
    ML_TRY(hash_store(s, &hash));
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)hash);
    json_t *file =
        json_pack("{s:s?, s:I, s:I, s:s}", "name", slash ? slash + 1 : path, "tokens",
                  (json_int_t)s->tokens, "bytes", (json_int_t)s->file.bytes, "hash", digits);
    return json_array_append_new(files, file) == 0
               ? ML_OK
               : ml_fail(ML_NO_MEMORY, "not enough host memory to identify %s", path);
}

static ml_status add_sources(const ml_corpus *c, json_t *sources) {
    for (int i = 0; i < c->count; i++) {
        const source *s = &c->sources[i];
        json_t *files = json_array();
        json_array_append_new(sources, json_pack("{s:I, s:o}", "weight",
                                                 (json_int_t)c->blend.count[i], "files", files));
        for (uint32_t k = 0; k < s->stores.count; k++)
            ML_TRY(add_store(&s->stores.at[k], s->name, files));
    }
    return ML_OK;
}

ml_status ml_corpus_identity(const ml_corpus *c, ml_bytes *text) {
    char digits[32] = "bytes";
    if (c->tokenizer)
        snprintf(digits, sizeof digits, "%016llx",
                 (unsigned long long)ml_tokenizer_hash(c->tokenizer));
    json_t *sources = json_array();
    ml_status status = add_sources(c, sources);
    json_t *all = json_pack("{s:s, s:o}", "tokenizer", digits, "sources", sources);
    char *line = all ? json_dumps(all, JSON_COMPACT) : NULL;
    if (status == ML_OK)
        status = line ? ml_bytes_add(text, line, strlen(line))
                      : ml_fail(ML_NO_MEMORY, "not enough host memory to identify the data");
    free(line);
    json_decref(all);
    return status;
}

/* ---- Drawing --------------------------------------------------------------------------------- */

/* The store of a source that has token `at`. */
static uint32_t find_store(const source *s, int64_t at) {
    uint32_t low = 0, high = s->stores.count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (s->begins[middle] <= at)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static ml_status beyond_vocab(const source *s, int64_t at, int32_t token, int64_t vocab) {
    uint32_t k = find_store(s, at);
    const store *file = &s->stores.at[k];
    if (file->origin)
        ml_fail(ML_IO, "token %d of the text of %s is not below vocab=%lld", token, file->origin,
                (long long)vocab);
    else
        ml_fail(ML_IO, "token %d at offset %lld of %s is not below vocab=%lld", token,
                (long long)(file->begin + (at - s->begins[k]) * file->width),
                file->file.path ? file->file.path : s->name, (long long)vocab);
    return ml_help("a larger vocab, or data of the tokenizer that the model is for");
}

/* Where the windows of a source may lie: `span` targets from token `begin` + 1. */
static ml_status find_span(const source *s, const ml_corpus_range *range, int64_t length,
                           int64_t *begin, int64_t *span) {
    double tokens = (double)s->begins[s->stores.count];
    int64_t end = (int64_t)floor(range->to * tokens);
    *begin = (int64_t)floor(range->from * tokens), *span = end - *begin - 1;
    if (length > 0 && *span >= length) return ML_OK;
    ml_fail(ML_IO, "%s has %lld tokens to draw from: a window of seq=%lld needs %lld", s->name,
            (long long)(end - *begin), (long long)length, (long long)length + 1);
    return ml_help("take a smaller seq, or more data");
}

ml_status ml_corpus_check(const ml_corpus *c, const ml_corpus_range *range, int64_t length) {
    int64_t begin, span;
    for (int i = 0; i < c->count; i++)
        ML_TRY(find_span(&c->sources[i], range, length, &begin, &span));
    return ML_OK;
}

/* Windows of a source begin every `length` tokens, at a place that each epoch shifts anew, by up to
 * a window where there are enough; the token after a window is its last target. */
static ml_status place(const ml_corpus *c, const ml_corpus_range *range, int64_t sample,
                       int64_t length, const source **from, int64_t *first) {
    enum { ENOUGH = 8 };
    int64_t nth, begin, span, at = blend_find(&c->blend, sample, &nth);
    *from = &c->sources[at];
    ML_TRY(find_span(*from, range, length, &begin, &span));
    int64_t windows = span / length;
    if (windows >= ENOUGH) windows--;
    uint64_t key = ml_mix(ml_mix((uint64_t)range->seed, (uint64_t)at), (uint64_t)(nth / windows));
    int64_t shift = (int64_t)(ml_mix(key, UINT64_MAX) % (uint64_t)(span - windows * length + 1));
    *first = begin + shift + order_permute(key, windows, nth % windows) * length;
    return ML_OK;
}

ml_status ml_corpus_sample(const ml_corpus *c, const ml_corpus_range *range, int64_t sample,
                           int64_t length, int32_t *tokens, unsigned char *begins) {
    const source *s;
    int64_t first = 0, done = 0;
    ML_TRY(place(c, range, sample, length, &s, &first));
    if (begins) memset(begins, 0, (size_t)length + 2);
    for (uint32_t k = find_store(s, first); done <= length; k++) {
        const store *at = &s->stores.at[k];
        int64_t from = first + done - s->begins[k], rest = at->tokens - from;
        int64_t count = length + 1 - done < rest ? length + 1 - done : rest;
        ML_TRY(store_read(at, from, count, tokens + done));
        if (begins) ML_TRY(store_mark(at, from, count, tokens + done, begins + done));
        done += count;
    }
    for (int64_t i = 0; range->vocab && i <= length; i++)
        if (tokens[i] >= range->vocab) return beyond_vocab(s, first + i, tokens[i], range->vocab);
    return ML_OK;
}

const char *ml_corpus_unmarked(const ml_corpus *c) {
    EACH_STORE(c, s) {
        if (!s->index.path && s->separator < 0 && s->width > 1) return s->file.path;
    }
    return NULL;
}

void ml_batch_put(const ml_batch *b, int64_t row, int64_t length, const int32_t *tokens,
                  const unsigned char *begins) {
    int64_t at = row * length;
    memcpy(b->inputs + at, tokens, (size_t)length * sizeof *tokens);
    memcpy(b->targets + at, tokens + 1, (size_t)length * sizeof *tokens);
    int32_t document = 0, position = 0;
    for (int64_t i = 0; b->documents && i < length; i++) {
        if (i > 0 && begins[i]) document++, position = 0;
        b->documents[at + i] = document, b->positions[at + i] = position++;
        if (begins[i + 1]) b->targets[at + i] = -1;
    }
}

ml_status ml_corpus_fill(const ml_corpus *c, const ml_corpus_range *range, int64_t sample,
                         int64_t rows, int64_t length, int64_t first, const ml_batch *batch) {
    int32_t *tokens = ml_alloc((size_t)(length + 1) * sizeof *tokens);
    unsigned char *begins = ml_alloc((size_t)length + 2);
    ml_status status =
        tokens && begins ? ML_OK : ml_fail(ML_NO_MEMORY, "not enough host memory for a sample");
    for (int64_t row = 0; row < rows && status == ML_OK; row++) {
        status = ml_corpus_sample(c, range, sample + row, length, tokens,
                                  batch->documents ? begins : NULL);
        if (status == ML_OK) ml_batch_put(batch, first + row, length, tokens, begins);
    }
    ml_free(tokens);
    ml_free(begins);
    return status;
}

ml_status ml_corpus_read(const ml_corpus *c, int64_t first, int64_t count, int32_t *tokens) {
    int64_t all = ml_corpus_tokens(c);
    if (first < 0 || count > all || first > all - count)
        return ml_fail(ML_INVALID, "%s has tokens 0 to %lld: %lld from %lld on are not among them",
                       ml_corpus_name(c), (long long)all - 1, (long long)count, (long long)first);
    EACH_STORE(c, s) {
        int64_t some = s->tokens - first < count ? s->tokens - first : count;
        if (some > 0) {
            ML_TRY(store_read(s, first, some, tokens));
            tokens += some, count -= some, first = 0;
        } else {
            first -= s->tokens;
        }
        if (count == 0) break;
    }
    return ML_OK;
}

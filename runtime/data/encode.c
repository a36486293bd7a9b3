/* Three stages, each a thread's, that hand batches of lines on to each other: reading, encoding (by
 * all threads of the pool), and what the sink does. */
#include "runtime/data/encode.h"

#include <pthread.h>

#include "runtime/base/memory.h"
#include "runtime/base/pool.h"
#include "runtime/data/text.h"

enum { BATCHES = 4, BATCH = 1 << 15, PARTS = 256, MOST_THREADS = 256, THREAD_BYTES = 1 << 21 };
typedef struct {
    int file;
    text_place place;
    size_t begin, end;  /* of the batch's text */
    const ml_ids *from; /* NULL: there is no document */
    int64_t first, count;
} document;

typedef enum { BATCH_FREE, BATCH_READ, BATCH_ENCODED } batch_state;
typedef struct {
    batch_state state;
    ml_bytes text; /* as the file has it */
    int64_t count;
    document documents[BATCH];
    ml_ids ids[MOST_THREADS]; /* of the documents that a thread encoded, each with ENCODE_SPARE */
} batch;

struct encoding {
    encode_options options;
    ml_pool *pool;
    int threads;
    ml_encoder *encoders[MOST_THREADS];
    ml_words *words[MOST_THREADS];
    ml_bytes held[MOST_THREADS]; /* a line's text */
    char *const *paths;
    int files, given; /* the file whose documents are given; -1: none yet */
    batch batches[BATCHES];
    batch *filled; /* by reading, number `read`; NULL: none is begun */
    int64_t read;
    int file;              /* that is read; all before are whole */
    ml_error unread;       /* why reading stopped */
    pthread_mutex_t mutex; /* of the states, and: */
    pthread_cond_t changed;
    int64_t total; /* batches; -1: not known yet */
    ml_error failed;
};

/* ---- From stage to stage ---------------------------------------------------------------------
 */

/* The batch of that number once it is in that state; NULL: there is none, or a stage failed. */
static batch *take(encoding *e, int64_t number, batch_state state) {
    batch *b = &e->batches[number % BATCHES];
    bool have = false;
    pthread_mutex_lock(&e->mutex);
    while (e->failed.status == ML_OK && (e->total < 0 || number < e->total) &&
           !(have = b->state == state))
        pthread_cond_wait(&e->changed, &e->mutex);
    pthread_mutex_unlock(&e->mutex);
    return have ? b : NULL;
}

static void hand_on(encoding *e, batch *b, batch_state state) {
    pthread_mutex_lock(&e->mutex);
    b->state = state;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->mutex);
}

static bool has_failed(encoding *e) {
    pthread_mutex_lock(&e->mutex);
    bool failed = e->failed.status != ML_OK;
    pthread_mutex_unlock(&e->mutex);
    return failed;
}

/* A stage ends: with an error all do. */
static void end_stage(encoding *e, ml_status status, int64_t total) {
    pthread_mutex_lock(&e->mutex);
    if (status != ML_OK && e->failed.status == ML_OK) e->failed = *ml_error_last();
    if (total >= 0) e->total = total;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->mutex);
}

/* ---- Reading ---------------------------------------------------------------------------------
 */

static void hand_on_filled(encoding *e) {
    hand_on(e, e->filled, BATCH_READ);
    e->filled = NULL;
    e->read++;
}

static ml_status add_text(void *context, text_place place, const char *text, size_t bytes) {
    encoding *e = context;
    batch *b = e->filled ? e->filled : (e->filled = take(e, e->read, BATCH_FREE));
    if (!b) return ml_fail(ML_INTERRUPTED, "another stage failed");
    document *d = &b->documents[b->count++];
    *d = (document){e->file, place, b->text.count, b->text.count + bytes, NULL, 0, 0};
    ML_TRY(ml_bytes_reserve(&b->text, bytes + 1)); /* never NULL */
    ML_TRY(ml_bytes_add(&b->text, text, bytes));
    size_t most = (size_t)(e->threads < 8 ? 8 : e->threads) * THREAD_BYTES;
    if (b->text.count >= most || b->count == BATCH) hand_on_filled(e);
    return ML_OK;
}

/* Of a file that cannot be read to its end nothing more is handed on, of those before all. */
static void drop_file(encoding *e) {
    batch *b = e->filled;
    e->unread = *ml_error_last();
    while (b && b->count > 0 && b->documents[b->count - 1].file == e->file) b->count--;
}

static void *read_texts(void *context) {
    encoding *e = context;
    ml_status status = ML_OK;
    for (e->file = 0; e->file < e->files; e->file++)
        if ((status = text_read(e->paths[e->file], add_text, e)) != ML_OK) break;
    if (status != ML_OK) drop_file(e);
    if (e->filled) hand_on_filled(e);
    end_stage(e, ML_OK, e->read);
    return NULL;
}

/* ---- Encoding --------------------------------------------------------------------------------
 */

static ml_status encode_one(encoding *e, batch *b, document *d, int thread) {
    const char *text;
    size_t bytes;
    ml_ids *ids = &b->ids[thread];
    ML_TRY(text_of(d->place, b->text.at + d->begin, d->end - d->begin, &e->held[thread], &text,
                   &bytes));
    if (!text) return ML_OK;
    if (!e->options.tokenizer) return ml_words_add(e->words[thread], text, bytes);
    d->from = ids, d->first = ids->count;
    ML_TRY(ml_encoder_encode(e->encoders[thread], text, bytes, e->options.flags, ids));
    d->count = ids->count - d->first;
    ML_TRY(ml_ids_reserve(ids, ENCODE_SPARE));
    ids->count += ENCODE_SPARE;
    return ML_OK;
}

typedef struct {
    encoding *encoding;
    batch *batch;
} encode_work;

static void encode_documents(void *context, int64_t begin, int64_t end, int thread) {
    const encode_work *work = context;
    for (int64_t i = begin; i < end; i++)
        ML_CHECK(encode_one(work->encoding, work->batch, &work->batch->documents[i], thread));
}

static ml_status encode_batches(encoding *e) {
    batch *b;
    for (int64_t n = 0; (b = take(e, n, BATCH_READ)); n++) {
        for (int i = 0; i < e->threads; i++) b->ids[i].count = 0;
        /* More parts than threads: documents differ in length. */
        ML_TRY(ml_pool_run(e->pool, b->count, b->count < PARTS ? b->count : PARTS, encode_documents,
                           &(encode_work){e, b}));
        hand_on(e, b, BATCH_ENCODED);
    }
    return ML_OK;
}

/* ---- What becomes of the ids -----------------------------------------------------------------
 */

/* The documents of files before that one are given. */
static ml_status reach_file(encoding *e, int file) {
    const encode_options *o = &e->options;
    for (; e->given < file; e->given++) {
        if (o->end && e->given >= 0) ML_TRY(o->end(o->context, e->given));
        if (o->begin && e->given + 1 < e->files) ML_TRY(o->begin(o->context, e->given + 1));
    }
    return ML_OK;
}

static ml_status give_batch(encoding *e, batch *b) {
    const encode_options *o = &e->options;
    int64_t bytes = 0;
    for (int64_t i = 0; i < b->count; i++) {
        const document *d = &b->documents[i];
        ML_TRY(reach_file(e, d->file));
        if (d->from) {
            ml_ids ids = {d->from->at + d->first, d->count, d->count + ENCODE_SPARE};
            ML_TRY(o->sink(o->context, &ids, d->place.ends));
        }
        bytes += (int64_t)(d->end - d->begin);
        if (i + 1 < b->count && b->documents[i + 1].file == d->file) continue;
        if (o->progress) o->progress(o->context, bytes);
        bytes = 0;
    }
    return ML_OK;
}

/* After the last batch: files without documents, and the end of the last one that is whole. */
static ml_status give_rest(encoding *e) {
    if (e->given >= e->file || e->file == 0) return ML_OK;
    ML_TRY(reach_file(e, e->file - 1));
    return e->options.end ? e->options.end(e->options.context, e->file - 1) : ML_OK;
}

static void *give_ids(void *context) {
    encoding *e = context;
    ml_status status = ML_OK;
    batch *b;
    for (int64_t n = 0; status == ML_OK && (b = take(e, n, BATCH_ENCODED)); n++) {
        status = give_batch(e, b);
        b->count = 0, b->text.count = 0;
        hand_on(e, b, BATCH_FREE);
    }
    if (status == ML_OK && !has_failed(e)) status = give_rest(e);
    end_stage(e, status, -1);
    return NULL;
}

ml_status encode_files(encoding *e, int count, char *const *paths) {
    pthread_t reading, giving;
    e->paths = paths, e->files = count, e->given = -1, e->read = 0, e->total = -1;
    e->unread.status = ML_OK;
    if (pthread_create(&reading, NULL, read_texts, e) != 0)
        return ml_fail(ML_NO_MEMORY, "no thread to read text");
    bool gives = pthread_create(&giving, NULL, give_ids, e) == 0;
    ml_status status = gives ? encode_batches(e) : ml_fail(ML_NO_MEMORY, "no thread to give ids");
    end_stage(e, status, -1);
    pthread_join(reading, NULL);
    if (gives) pthread_join(giving, NULL);
    const ml_error *error = e->failed.status != ML_OK ? &e->failed : &e->unread;
    if (error->status != ML_OK) *ml_error_last() = *error;
    return error->status;
}

/* ---- All files -------------------------------------------------------------------------------
 */

static ml_status begin(encoding *e) {
    e->threads = ml_cpu_count() < MOST_THREADS ? ml_cpu_count() : MOST_THREADS;
    e->pool = ml_pool_new(e->threads);
    if (!e->pool) return ml_fail(ML_NO_MEMORY, "not enough host memory to make tokens of text");
    for (int i = 0; i < e->threads; i++)
        ML_TRY(e->options.tokenizer ? ml_encoder_open(e->options.tokenizer, &e->encoders[i])
                                    : ml_words_open(&e->words[i]));
    return ML_OK;
}

ml_status encode_open(const encode_options *options, encoding **out) {
    encoding *e = *out = ml_alloc(sizeof *e);
    if (!e) return ml_fail(ML_NO_MEMORY, "not enough host memory to make tokens of text");
    e->options = *options;
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->changed, NULL);
    ml_status status = begin(e);
    if (status != ML_OK) encode_close(e), *out = NULL;
    return status;
}

void encode_close(encoding *e) {
    if (!e) return;
    for (int i = 0; i < e->threads; i++) {
        ml_encoder_close(e->encoders[i]);
        ml_words_close(e->words[i]);
        ml_bytes_free(&e->held[i]);
        for (int k = 0; k < BATCHES; k++) ml_ids_free(&e->batches[k].ids[i]);
    }
    ml_pool_free(e->pool);
    for (int k = 0; k < BATCHES; k++) ml_bytes_free(&e->batches[k].text);
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->changed);
    ml_free(e);
}

ml_status encode_words(encoding *e, const ml_words **words) {
    for (int i = 1; i < e->threads; i++) ML_TRY(ml_words_merge(e->words[0], e->words[i]));
    *words = e->words[0];
    return ML_OK;
}

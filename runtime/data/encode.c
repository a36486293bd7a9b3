/* One thread reads files into chunks of documents. Each thread of the pool takes the next chunk and
 * encodes it. Chunks that are encoded are placed one after another, by whichever thread is free:
 * then it is known where their ids belong, and the same thread writes them beside the others. */
#include "runtime/data/encode.h"

#include <pthread.h>
#include <stdatomic.h>

#include "runtime/base/memory.h"
#include "runtime/base/pool.h"
#include "runtime/data/text.h"

enum {
    MOST_THREADS = 256,
    CHUNK = 1 << 19,     /* bytes of text, or one document that has more */
    LARGE = 1 << 23,     /* of a chunk's memory: not held for the next */
    CHUNKS_A_THREAD = 4, /* read, encoded and written at once */
    FILES = 512          /* of the chunks that are written at once: each is open */
};

typedef struct {
    int file;
    text_place place;
    size_t begin, end;    /* of the chunk's text */
    bool given;           /* there is a document: the line is not blank */
    int64_t first, count; /* of the chunk's ids */
    int64_t at;           /* in its file's */
} document;

typedef enum { CHUNK_FREE, CHUNK_READ, CHUNK_TAKEN, CHUNK_ENCODED, CHUNK_PLACED } chunk_state;
typedef struct {
    chunk_state state;
    ml_bytes text; /* as the file has it */
    document *documents;
    int64_t count, capacity;
    int files; /* that documents are of */
    ml_ids ids;
} chunk;

/* Of a file: `open` counts what is not written, and one until it is placed as a whole. */
typedef struct {
    int64_t tokens;
    atomic_int open;
} output;

struct encoding {
    encode_options options;
    ml_pool *pool;
    int threads;
    ml_encoder *encoders[MOST_THREADS];
    ml_words *words[MOST_THREADS];
    ml_bytes held[MOST_THREADS]; /* a line's text */
    char *const *paths;
    output *outputs;
    int files, given; /* the file whose documents are placed; -1: none yet */
    chunk *chunks;
    int ring;      /* how many */
    chunk *filled; /* by reading, number `read`; NULL: none is begun */
    int64_t read;
    int file;              /* that is read; all before are whole */
    ml_error unread;       /* why reading stopped */
    pthread_mutex_t mutex; /* of the chunks' states, and: */
    pthread_cond_t changed;
    int64_t taken, placed, total; /* chunks: taken to be encoded; placed; all, INT64_MAX: unknown */
    bool placing, stopped;
    ml_error failed;
};

static chunk *chunk_at(encoding *e, int64_t number) {
    return &e->chunks[number % e->ring];
}

/* With e->mutex: chunks from that number on are not worked on. Of several errors the first in the
 * order of the text is left: chunks before it were taken before. */
static void fail_at(encoding *e, int64_t number) {
    if (number < e->total || e->failed.status == ML_OK) e->failed = *ml_error_last();
    if (number < e->total) e->total = number;
}

/* ---- Reading ---------------------------------------------------------------------------------
 */

static void set_state(encoding *e, chunk *c, chunk_state state) {
    pthread_mutex_lock(&e->mutex);
    c->state = state;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->mutex);
}

static void hand_on_filled(encoding *e) {
    set_state(e, e->filled, CHUNK_READ);
    e->filled = NULL;
    e->read++;
}

static chunk *take_free(encoding *e) {
    chunk *c = chunk_at(e, e->read);
    pthread_mutex_lock(&e->mutex);
    while (!e->stopped && e->read < e->total && c->state != CHUNK_FREE)
        pthread_cond_wait(&e->changed, &e->mutex);
    const bool wanted = !e->stopped && e->read < e->total;
    pthread_mutex_unlock(&e->mutex);
    return wanted ? c : NULL;
}

static ml_status add_document(chunk *c, document d) {
    if (c->count == c->capacity) {
        int64_t room = c->capacity ? 2 * c->capacity : 64;
        document *more = ml_realloc(c->documents, (size_t)c->capacity * sizeof *more,
                                    (size_t)room * sizeof *more);
        if (!more) return ml_fail(ML_NO_MEMORY, "not enough host memory to read text");
        c->documents = more, c->capacity = room;
    }
    c->documents[c->count++] = d;
    return ML_OK;
}

static ml_status add_text(void *context, text_place place, const char *text, size_t bytes) {
    encoding *e = context;
    chunk *c = e->filled ? e->filled : (e->filled = take_free(e));
    if (!c) return ml_fail(ML_INTERRUPTED, "text is not encoded any more");
    c->files += c->count == 0 || c->documents[c->count - 1].file != e->file;
    ML_TRY(add_document(c, (document){.file = e->file,
                                      .place = place,
                                      .begin = c->text.count,
                                      .end = c->text.count + bytes}));
    ML_TRY(ml_bytes_reserve(&c->text, bytes + 1)); /* never NULL */
    ML_TRY(ml_bytes_add(&c->text, text, bytes));
    if (c->text.count >= CHUNK) hand_on_filled(e);
    return ML_OK;
}

/* Of a file that cannot be read to its end nothing more is handed on, of those before all. */
static void drop_file(encoding *e) {
    chunk *c = e->filled;
    e->unread = *ml_error_last();
    while (c && c->count > 0 && c->documents[c->count - 1].file == e->file) c->count--;
}

static void *read_texts(void *context) {
    encoding *e = context;
    ml_status status = ML_OK;
    for (e->file = 0; e->file < e->files; e->file++) {
        if ((status = text_read(e->paths[e->file], add_text, e)) != ML_OK) break;
        if (e->filled && e->filled->files >= FILES / e->threads) hand_on_filled(e);
    }
    if (status != ML_OK) drop_file(e);
    if (e->filled) hand_on_filled(e);
    pthread_mutex_lock(&e->mutex);
    if (e->read < e->total) e->total = e->read;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->mutex);
    return NULL;
}

/* ---- Encoding --------------------------------------------------------------------------------
 */

static ml_status encode_one(encoding *e, chunk *c, document *d, int thread) {
    const char *text;
    size_t bytes;
    ml_ids *ids = &c->ids;
    d->first = ids->count;
    ML_TRY(text_of(d->place, c->text.at + d->begin, d->end - d->begin, &e->held[thread], &text,
                   &bytes));
    if (!text) return ML_OK;
    if (!e->options.tokenizer) return ml_words_add(e->words[thread], text, bytes);
    ML_TRY(ml_encoder_encode(e->encoders[thread], text, bytes, e->options.flags, ids));
    if (e->options.finish)
        ML_TRY(e->options.finish(e->options.context, ids, d->first, d->place.ends));
    d->count = ids->count - d->first;
    d->given = true;
    return ML_OK;
}

static ml_status encode_chunk(encoding *e, chunk *c, int thread) {
    for (int64_t i = 0; i < c->count; i++) ML_TRY(encode_one(e, c, &c->documents[i], thread));
    return ML_OK;
}

/* ---- Placing and writing ---------------------------------------------------------------------
 */

/* Something of a file is written, or placed as a whole: what is left last ends it. */
static ml_status close_output(encoding *e, int file) {
    const bool last = atomic_fetch_sub(&e->outputs[file].open, 1) == 1;
    return last && e->options.end ? e->options.end(e->options.context, file) : ML_OK;
}

static ml_status leave_file(encoding *e) {
    const encode_options *o = &e->options;
    if (o->leave) ML_TRY(o->leave(o->context, e->given));
    return close_output(e, e->given);
}

/* The documents of files before that one are placed. */
static ml_status reach_file(encoding *e, int file) {
    const encode_options *o = &e->options;
    while (e->given < file) {
        if (e->given >= 0) ML_TRY(leave_file(e));
        atomic_store(&e->outputs[++e->given].open, 1);
        if (o->begin) ML_TRY(o->begin(o->context, e->given));
    }
    return ML_OK;
}

/* From document i on those of its file, [i, the result): their ids are one range. */
static int64_t end_of_file(const chunk *c, int64_t i) {
    const int file = c->documents[i].file;
    while (i < c->count && c->documents[i].file == file) i++;
    return i;
}

static ml_status place_chunk(encoding *e, chunk *c) {
    const encode_options *o = &e->options;
    for (int64_t i = 0, last; i < c->count; i = last) {
        int64_t bytes = 0;
        const int file = c->documents[i].file;
        last = end_of_file(c, i);
        ML_TRY(reach_file(e, file));
        output *out = &e->outputs[file];
        atomic_fetch_add(&out->open, 1);
        for (int64_t k = i; k < last; k++) {
            document *d = &c->documents[k];
            bytes += (int64_t)(d->end - d->begin);
            d->at = out->tokens;
            if (!d->given) continue;
            ML_TRY(o->sink(o->context, c->ids.at + d->first, d->count, d->place.ends));
            out->tokens += d->count;
        }
        if (o->progress) o->progress(o->context, bytes);
    }
    return ML_OK;
}

static ml_status write_chunk(encoding *e, chunk *c) {
    const encode_options *o = &e->options;
    for (int64_t i = 0, last; i < c->count; i = last) {
        const document *d = &c->documents[i];
        last = end_of_file(c, i);
        const document *end = &c->documents[last - 1];
        const int64_t count = end->first + end->count - d->first;
        if (o->write && count > 0)
            ML_TRY(o->write(o->context, d->file, d->at, c->ids.at + d->first, count));
        ML_TRY(close_output(e, d->file));
    }
    return ML_OK;
}

/* ---- What a thread does ----------------------------------------------------------------------
 */

static void empty_chunk(chunk *c) {
    if (c->text.capacity > LARGE) ml_bytes_free(&c->text);
    if (c->ids.capacity > LARGE / 4) ml_ids_free(&c->ids);
    c->count = 0, c->files = 0, c->text.count = 0, c->ids.count = 0;
}

/* Each with e->mutex, which it lets go meanwhile; false: nothing is there to do. */
static bool place_next(encoding *e) {
    const int64_t number = e->placed;
    chunk *c = chunk_at(e, number);
    if (e->placing || number >= e->total || c->state != CHUNK_ENCODED) return false;
    e->placing = true;
    pthread_mutex_unlock(&e->mutex);
    ml_status status = place_chunk(e, c);
    pthread_mutex_lock(&e->mutex);
    c->state = CHUNK_PLACED;
    e->placing = false;
    e->placed++;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->mutex);
    if (status == ML_OK) status = write_chunk(e, c);
    empty_chunk(c);
    pthread_mutex_lock(&e->mutex);
    if (status != ML_OK) fail_at(e, number), e->stopped = true;
    c->state = CHUNK_FREE;
    pthread_cond_broadcast(&e->changed);
    return true;
}

static bool encode_next(encoding *e, int thread) {
    const int64_t number = e->taken;
    chunk *c = chunk_at(e, number);
    if (number >= e->total || c->state != CHUNK_READ) return false;
    e->taken++;
    c->state = CHUNK_TAKEN;
    pthread_mutex_unlock(&e->mutex);
    ml_status status = encode_chunk(e, c, thread);
    pthread_mutex_lock(&e->mutex);
    if (status != ML_OK) fail_at(e, number);
    c->state = CHUNK_ENCODED;
    pthread_cond_broadcast(&e->changed);
    return true;
}

static void work(void *context, int64_t begin, int64_t end, int thread) {
    encoding *e = context;
    (void)begin, (void)end;
    pthread_mutex_lock(&e->mutex);
    while (!e->stopped && e->placed < e->total)
        if (!place_next(e) && !encode_next(e, thread)) pthread_cond_wait(&e->changed, &e->mutex);
    pthread_mutex_unlock(&e->mutex);
}

/* After the last chunk: files without documents, and the end of the last one that is whole. */
static ml_status place_rest(encoding *e) {
    if (e->given >= e->file || e->file == 0) return ML_OK;
    ML_TRY(reach_file(e, e->file - 1));
    return leave_file(e);
}

static ml_status run(encoding *e) {
    pthread_t reading;
    if (pthread_create(&reading, NULL, read_texts, e) != 0)
        return ml_fail(ML_NO_MEMORY, "no thread to read text");
    ml_status status = ml_pool_run(e->pool, e->threads, e->threads, work, e);
    pthread_join(reading, NULL);
    if (status != ML_OK) return status;
    if (e->failed.status == ML_OK) return place_rest(e);
    *ml_error_last() = e->failed;
    return e->failed.status;
}

ml_status encode_files(encoding *e, int count, char *const *paths) {
    e->paths = paths, e->files = count, e->given = -1;
    e->read = e->taken = e->placed = 0, e->total = INT64_MAX;
    e->placing = e->stopped = false;
    e->failed.status = e->unread.status = ML_OK;
    e->outputs = ml_alloc(((size_t)count + 1) * sizeof *e->outputs);
    if (!e->outputs) return ml_fail(ML_NO_MEMORY, "not enough host memory for %d files", count);
    ml_status status = run(e);
    ml_free(e->outputs);
    e->outputs = NULL;
    if (status != ML_OK || e->unread.status == ML_OK) return status;
    *ml_error_last() = e->unread;
    return e->unread.status;
}

/* ---- All files -------------------------------------------------------------------------------
 */

static ml_status begin(encoding *e) {
    e->threads = ml_cpu_count() < MOST_THREADS ? ml_cpu_count() : MOST_THREADS;
    e->pool = ml_pool_new(e->threads);
    e->ring = CHUNKS_A_THREAD * (e->threads + 1);
    e->chunks = ml_alloc((size_t)e->ring * sizeof *e->chunks);
    if (!e->pool || !e->chunks)
        return ml_fail(ML_NO_MEMORY, "not enough host memory to make tokens of text");
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
    }
    ml_pool_free(e->pool);
    for (int i = 0; e->chunks && i < e->ring; i++) {
        ml_bytes_free(&e->chunks[i].text);
        ml_ids_free(&e->chunks[i].ids);
        ml_free(e->chunks[i].documents);
    }
    ml_free(e->chunks);
    pthread_mutex_destroy(&e->mutex);
    pthread_cond_destroy(&e->changed);
    ml_free(e);
}

ml_status encode_words(encoding *e, const ml_words **words) {
    for (int i = 1; i < e->threads; i++) ML_TRY(ml_words_merge(e->words[0], e->words[i]));
    *words = e->words[0];
    return ML_OK;
}

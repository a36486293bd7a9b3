#include "runtime/data/encode.h"

#include "runtime/base/memory.h"
#include "runtime/base/pool.h"
#include "runtime/data/text.h"

/* Texts are gathered up to a batch, whose documents the threads share. */
enum { BATCH_BYTES = 1 << 24, BATCH = 1 << 14, MOST_THREADS = 256 };
typedef struct {
    size_t begin, end; /* of the batch's text */
    bool ends;
    ml_ids ids;
} document;

struct encoding {
    encode_options options;
    ml_pool *pool;
    int threads;
    ml_encoder *encoders[MOST_THREADS];
    ml_words *words[MOST_THREADS];
    ml_bytes text;
    int64_t count;
    document documents[BATCH];
};

static void encode_documents(void *context, int64_t begin, int64_t end, int thread) {
    encoding *e = context;
    for (document *d = e->documents + begin; d < e->documents + end; d++) {
        const char *text = e->text.at + d->begin;
        size_t bytes = d->end - d->begin;
        d->ids.count = 0;
        ML_CHECK(e->options.tokenizer ? ml_encoder_encode(e->encoders[thread], text, bytes,
                                                          e->options.flags, &d->ids)
                                      : ml_words_add(e->words[thread], text, bytes));
    }
}

static ml_status flush(encoding *e) {
    enum { PARTS = 256 }; /* more than there are threads: documents differ in length */
    const encode_options *o = &e->options;
    int64_t count = e->count, bytes = (int64_t)e->text.count;
    e->count = 0;
    if (count == 0) return ML_OK;
    ML_TRY(ml_pool_run(e->pool, count, count < PARTS ? count : PARTS, encode_documents, e));
    for (int64_t i = 0; i < count && o->tokenizer; i++)
        ML_TRY(o->sink(o->context, &e->documents[i].ids, e->documents[i].ends));
    e->text.count = 0;
    if (o->progress) o->progress(o->context, bytes);
    return ML_OK;
}

static ml_status add_text(void *context, const char *text, size_t bytes, bool ends) {
    encoding *e = context;
    document *d = &e->documents[e->count++];
    d->begin = e->text.count, d->end = d->begin + bytes, d->ends = ends;
    ML_TRY(ml_bytes_reserve(&e->text, bytes + 1)); /* never NULL */
    ML_TRY(ml_bytes_add(&e->text, text, bytes));
    return e->text.count >= BATCH_BYTES || e->count == BATCH ? flush(e) : ML_OK;
}

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
    ml_status status = begin(e);
    if (status != ML_OK) encode_close(e), *out = NULL;
    return status;
}

void encode_close(encoding *e) {
    if (!e) return;
    for (int i = 0; i < e->threads; i++) {
        ml_encoder_close(e->encoders[i]);
        ml_words_close(e->words[i]);
    }
    ml_pool_free(e->pool);
    for (int i = 0; i < BATCH; i++) ml_ids_free(&e->documents[i].ids);
    ml_bytes_free(&e->text);
    ml_free(e);
}

ml_status encode_file(encoding *e, const char *path) {
    ML_TRY(text_read(path, add_text, e));
    return flush(e);
}

ml_status encode_words(encoding *e, const ml_words **words) {
    for (int i = 1; i < e->threads; i++) ML_TRY(ml_words_merge(e->words[0], e->words[i]));
    *words = e->words[0];
    return ML_OK;
}

#include "runtime/data/encode.h"

#include "runtime/base/memory.h"
#include "runtime/base/pool.h"
#include "runtime/data/text.h"

/* Texts are gathered up to a batch, whose documents the threads share. */
enum { BATCH_BYTES = 8 << 20, BATCH = 4096, MOST_THREADS = 64 };
typedef struct {
    size_t begin, end; /* of the batch's text */
    bool ends;
    ml_ids ids;
} document;

typedef struct {
    const ml_tokenizer *tokenizer;
    encode_sink *sink;
    void *context;
    ml_pool *pool;
    ml_encoder *encoders[MOST_THREADS];
    ml_bytes text;
    int64_t count;
    document *documents; /* [BATCH] */
} encoding;

static void encode_documents(void *context, int64_t begin, int64_t end, int thread) {
    encoding *e = context;
    for (int64_t i = begin; i < end; i++) {
        document *d = &e->documents[i];
        d->ids.count = 0;
        ML_CHECK(ml_encoder_encode(e->encoders[thread], e->text.at + d->begin, d->end - d->begin, 0,
                                   &d->ids));
    }
}

static ml_status flush(encoding *e) {
    enum { PARTS = 256 }; /* more than there are threads: documents differ in length */
    int64_t count = e->count;
    e->count = 0;
    if (count == 0) return ML_OK;
    ML_TRY(ml_pool_run(e->pool, count, count < PARTS ? count : PARTS, encode_documents, e));
    for (int64_t i = 0; i < count; i++)
        ML_TRY(e->sink(e->context, &e->documents[i].ids, e->documents[i].ends));
    e->text.count = 0;
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
    int threads = ml_cpu_count() < MOST_THREADS ? ml_cpu_count() : MOST_THREADS;
    e->documents = ml_alloc(BATCH * sizeof *e->documents);
    e->pool = ml_pool_new(threads);
    if (!e->documents || !e->pool)
        return ml_fail(ML_NO_MEMORY, "not enough host memory to make tokens of text");
    for (int i = 0; i < threads; i++) ML_TRY(ml_encoder_open(e->tokenizer, &e->encoders[i]));
    return ML_OK;
}

ml_status encode_file(const char *path, const ml_tokenizer *tokenizer, encode_sink *sink,
                      void *context) {
    encoding e = {.tokenizer = tokenizer, .sink = sink, .context = context};
    ml_status status = begin(&e);
    if (status == ML_OK) status = text_read(path, add_text, &e);
    if (status == ML_OK) status = flush(&e);
    for (int i = 0; i < MOST_THREADS; i++)
        if (e.encoders[i]) ml_encoder_close(e.encoders[i]);
    if (e.pool) ml_pool_free(e.pool);
    for (int i = 0; e.documents && i < BATCH; i++) ml_ids_free(&e.documents[i].ids);
    ml_free(e.documents);
    ml_bytes_free(&e.text);
    return status;
}

#define _GNU_SOURCE /* sync_file_range */
#include "runtime/io/tensor_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/pool.h"
#include "runtime/base/process.h"
#include "runtime/graph/convert.h"
#include "runtime/io/durable.h"

enum { PIECE = 1 << 19, WIDEST = 8, THREADS = 16 }; /* elements; bytes of one */

struct ml_tensor_writer {
    int file;
    int64_t at; /* in the file: of the next tensor */
    pthread_t thread;
    bool running;
    ml_dtype from, to; /* of the tensor under way */
    const char *values;
    int64_t count;
    ml_pool *pool;
    char *scratch;   /* a piece of each thread; NULL: nothing was cast */
    ml_error failed; /* status ML_OK: nothing has */
    char path[];
};

static void pieces_write(void *context, int64_t begin, int64_t end, int thread) {
    ml_tensor_writer *w = context;
    const int64_t width = ml_dtypes[w->to].bytes;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i * PIECE, left = w->count - first;
        const int64_t count = left < PIECE ? left : PIECE;
        const char *values = w->values + first * ml_dtypes[w->from].bytes;
        if (w->from != w->to) {
            char *cast = w->scratch + (int64_t)thread * PIECE * WIDEST;
            ml_convert(w->from, values, w->to, cast, count);
            values = cast;
        }
        const int64_t at = w->at + first * width;
        ML_CHECK(ml_durable_write(w->file, w->path, at, values, count * width));
        /* The disk begins now, not once the system has much to write; failing is no harm. */
        sync_file_range(w->file, at, count * width, SYNC_FILE_RANGE_WRITE);
    }
}

static ml_status tensor_write(ml_tensor_writer *w) {
    const int64_t pieces = (w->count + PIECE - 1) / PIECE;
    if (pieces == 0) return ML_OK;
    if (w->pool == NULL) w->pool = ml_pool_new(ml_cpu_count() < THREADS ? ml_cpu_count() : THREADS);
    if (w->pool != NULL && w->from != w->to && w->scratch == NULL)
        w->scratch = ml_alloc((size_t)ml_pool_threads(w->pool) * PIECE * WIDEST);
    if (w->pool == NULL || (w->from != w->to && w->scratch == NULL))
        return ml_fail(ML_NO_MEMORY, "out of memory while writing %s", w->path);
    return ml_pool_run(w->pool, pieces, pieces, pieces_write, w);
}

static void *writer_body(void *context) {
    ml_tensor_writer *w = context;
    if (tensor_write(w) != ML_OK) w->failed = *ml_error_last();
    return NULL;
}

static ml_status writer_join(ml_tensor_writer *w) {
    if (w->running) {
        pthread_join(w->thread, NULL);
        w->at += w->count * ml_dtypes[w->to].bytes;
    }
    w->running = false;
    if (w->failed.status != ML_OK) *ml_error_last() = w->failed;
    return w->failed.status;
}

ml_status ml_tensor_writer_new(const char *path, const char *header, size_t bytes,
                               ml_tensor_writer **writer) {
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)((uint64_t)bytes >> 8 * i);
    ml_tensor_writer *w = *writer = ml_alloc(sizeof *w + strlen(path) + 1);
    if (w == NULL) return ml_fail(ML_NO_MEMORY, "out of memory while writing %s", path);
    strcpy(w->path, path);
    w->at = (int64_t)bytes + 8;
    w->file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    ml_status status = w->file >= 0 ? ml_durable_write(w->file, path, 0, length, 8)
                                    : ml_fail(ML_IO, "cannot write %s: %s", path, strerror(errno));
    if (status == ML_OK) status = ml_durable_write(w->file, path, 8, header, (int64_t)bytes);
    if (status == ML_OK) return ML_OK;
    w->failed = *ml_error_last();
    *writer = NULL;
    return ml_tensor_writer_close(w);
}

ml_status ml_tensor_writer_add(ml_tensor_writer *w, ml_dtype from, const void *values,
                               int64_t count, ml_dtype to) {
    ML_TRY(writer_join(w));
    w->from = from;
    w->to = to;
    w->values = values;
    w->count = count;
    w->running = ml_process_thread(&w->thread, writer_body, w) == 0;
    if (w->running) return ML_OK;
    ml_status status = tensor_write(w);
    w->at += count * ml_dtypes[to].bytes;
    return status;
}

ml_status ml_tensor_writer_close(ml_tensor_writer *w) {
    if (w == NULL) return ML_OK;
    ml_status status = writer_join(w);
    if (w->file >= 0 && close(w->file) != 0 && status == ML_OK)
        status = ml_fail(ML_IO, "cannot write %s: %s", w->path, strerror(errno));
    if (w->pool != NULL) ml_pool_free(w->pool);
    ml_free(w->scratch);
    ml_free(w);
    return status;
}

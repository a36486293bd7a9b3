#include "runtime/data/writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/memory.h"
#include "runtime/base/pool.h"

enum { LLMC_HEADER = 1024, BLOCK = 1 << 15 /* tokens that are written at once */ };

struct ml_writer {
    char *path, *part;
    FILE *file;
    ml_write_format format;
    bool synced;
    int width;
    int64_t tokens;   /* written in all */
    int64_t begin;    /* the first one of the document */
    int32_t *lengths; /* of Megatron's sequences */
    int64_t count, capacity;
};

static ml_status failed(const char *what, const char *path) {
    return ml_fail(ML_IO, "cannot %s %s: %s", what, path, strerror(errno));
}

static void put(unsigned char *to, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) to[i] = (unsigned char)(value >> 8 * i);
}

static ml_status write_bytes(FILE *file, const char *path, const void *bytes, size_t count) {
    return fwrite(bytes, 1, count, file) == count ? ML_OK : failed("write", path);
}

static ml_status write_at(const ml_writer *w, int64_t offset, const void *bytes, int64_t count) {
    for (int64_t done = 0; done < count;) {
        ssize_t got = pwrite(fileno(w->file), (const char *)bytes + done, (size_t)(count - done),
                             (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return failed("write", w->part);
        done += got;
    }
    return ML_OK;
}

static void free_writer(ml_writer *w) {
    if (w->file) fclose(w->file);
    ml_free(w->path);
    ml_free(w->part);
    ml_free(w->lengths);
    ml_free(w);
}

static ml_status write_header(ml_writer *w) {
    unsigned char header[LLMC_HEADER] = {0};
    put(header, w->width == 2 ? 20240520 : 20240801, 4);
    put(header + 4, w->width == 2 ? 1 : 7, 4);
    put(header + 8, (uint64_t)w->tokens, 4);
    return write_bytes(w->file, w->part, header, sizeof header);
}

/* Who reads the .bin would take what is beside it for its index. */
static ml_status check_no_index(const char *path) {
    char index[4096];
    int length = snprintf(index, sizeof index, "%.*s.idx", (int)strlen(path) - 4, path);
    if (length >= (int)sizeof index || access(index, F_OK) != 0) return ML_OK;
    ml_fail(ML_IO, "cannot write %s: %s would be taken for its index", path, index);
    return ml_help("remove that, or choose another name");
}

ml_status ml_writer_open(const char *path, ml_write_format format, int width, ml_writer **result) {
    size_t length = strlen(path);
    ml_writer *w = *result = NULL;
    const bool synced = format != ML_WRITE_PART;
    if (!synced) format = ML_WRITE_MEGATRON;
    if (length < 5 || strcmp(path + length - 4, ".bin") != 0)
        return ml_fail(ML_INVALID, "%s does not end in .bin, as files of tokens do", path);
    if (width != 2 && width != 4 && !(width == 1 && format == ML_WRITE_MEGATRON))
        return ml_fail(ML_INVALID, "%d bytes are no width of a token", width);
    if (format != ML_WRITE_MEGATRON) ML_TRY(check_no_index(path));
    w = ml_alloc(sizeof *w);
    if (w) w->path = ml_alloc(length + 8), w->part = ml_alloc(length + 8);
    if (!w || !w->path || !w->part) {
        if (w) free_writer(w);
        return ml_fail(ML_NO_MEMORY, "not enough host memory to write %s", path);
    }
    strcpy(w->path, path);
    snprintf(w->part, length + 8, "%s.part", path);
    w->format = format, w->width = width, w->synced = synced;
    w->file = fopen(w->part, "wbe");
    ml_status status = w->file ? ML_OK : failed("write", w->part);
    if (status == ML_OK && format == ML_WRITE_LLMC) status = write_header(w);
    if (status == ML_OK)
        *result = w;
    else
        free_writer(w);
    return status;
}

/* As the file has them: ids of 4 bytes as they are, for the processors are little-endian too. */
static const void *narrow(uint16_t *to, const uint32_t *ids, int64_t count, int width) {
    for (int64_t i = 0; width == 1 && i < count; i++)
        ((unsigned char *)to)[i] = (unsigned char)ids[i];
    for (int64_t i = 0; width == 2 && i < count; i++) to[i] = (uint16_t)ids[i];
    return width == 4 ? (const void *)ids : to;
}

/* A block of at most BLOCK ids, as it is in the file. */
static ml_status to_file(const ml_writer *w, uint16_t block[BLOCK], const uint32_t *ids,
                         int64_t count, const void **bytes) {
    const uint32_t most = w->width < 4 ? (1u << 8 * w->width) - 1 : INT32_MAX;
    uint32_t bits = 0;
    for (int64_t k = 0; k < count; k++) bits |= ids[k];
    for (int64_t k = 0; bits > most && k < count; k++)
        if (ids[k] > most) {
            ml_fail(ML_IO, "token %u does not fit the %d bytes of a token in %s", ids[k], w->width,
                    w->path);
            return ml_help("write 4 bytes a token");
        }
    *bytes = narrow(block, ids, count, w->width);
    return ML_OK;
}

ml_status ml_writer_add(ml_writer *w, const uint32_t *ids, int64_t count) {
    uint16_t block[BLOCK];
    const void *bytes;
    for (int64_t i = 0; i < count; i += BLOCK) {
        int64_t part = count - i < BLOCK ? count - i : BLOCK;
        ML_TRY(to_file(w, block, ids + i, part, &bytes));
        ML_TRY(write_bytes(w->file, w->part, bytes, (size_t)(part * w->width)));
    }
    w->tokens += count;
    return ML_OK;
}

ml_status ml_writer_place(ml_writer *w, int64_t count, bool ends) {
    w->tokens += count;
    return ends ? ml_writer_end_document(w) : ML_OK;
}

int64_t ml_writer_tokens(const ml_writer *w) {
    return w->tokens;
}

ml_status ml_writer_put(ml_writer *w, int64_t at, const uint32_t *ids, int64_t count) {
    uint16_t block[BLOCK];
    const void *bytes;
    for (int64_t i = 0; i < count; i += BLOCK) {
        int64_t part = count - i < BLOCK ? count - i : BLOCK;
        ML_TRY(to_file(w, block, ids + i, part, &bytes));
        ML_TRY(write_at(w, (at + i) * w->width, bytes, part * w->width));
    }
    return ML_OK;
}

static ml_status reserve_lengths(ml_writer *w, int64_t count) {
    if (w->capacity - w->count >= count) return ML_OK;
    int64_t more = 2 * w->capacity + count + 1024;
    int32_t *grown = ml_realloc(w->lengths, (size_t)w->capacity * 4, (size_t)more * 4);
    if (!grown) return ml_fail(ML_NO_MEMORY, "not enough host memory to write %s", w->path);
    w->lengths = grown, w->capacity = more;
    return ML_OK;
}

ml_status ml_writer_end_document(ml_writer *w) {
    int64_t length = w->tokens - w->begin;
    w->begin = w->tokens;
    if (w->format != ML_WRITE_MEGATRON || length == 0) return ML_OK;
    if (length > INT32_MAX)
        return ml_fail(ML_IO, "a document of %lld tokens in %s: 2^31 - 1 are the most",
                       (long long)length, w->path);
    ML_TRY(reserve_lengths(w, 1));
    w->lengths[w->count++] = (int32_t)length;
    return ML_OK;
}

/* ---- Files that are whole --------------------------------------------------------------------
 */

typedef struct {
    ml_writer *writer;
    char *const *parts;
    int64_t *offsets; /* of each part in the file, and the end */
    const int64_t *done;
} joining;

static ml_status read_lengths(ml_writer *w, const char *part) {
    char index[4096];
    unsigned char head[34];
    snprintf(index, sizeof index, "%.*s.idx", (int)strlen(part) - 4, part);
    FILE *file = fopen(index, "rbe");
    if (!file) return failed("open", index);
    uint64_t count = 0;
    bool read = fread(head, 1, sizeof head, file) == sizeof head;
    for (int i = 0; i < 8; i++) count |= (uint64_t)head[18 + i] << 8 * i;
    ml_status status =
        read && count < INT64_MAX / 8 ? reserve_lengths(w, (int64_t)count) : failed("read", index);
    if (status == ML_OK && fread(w->lengths + w->count, 4, count, file) != count)
        status = failed("read", index);
    if (status == ML_OK) w->count += (int64_t)count;
    fclose(file);
    return status;
}

static ml_status copy_part(const joining *j, int64_t i, int in, char *block, size_t room) {
    int64_t at = j->offsets[i], end = j->offsets[i + 1];
    while (at < end) {
        size_t most = (size_t)(end - at) < room ? (size_t)(end - at) : room;
        ssize_t got = pread(in, block, most, at - j->offsets[i]);
        if (got <= 0) return failed("read", j->parts[i]);
        ML_TRY(write_at(j->writer, at, block, got));
        at += got;
    }
    return ML_OK;
}

static void copy_parts(void *context, int64_t begin, int64_t end, int thread) {
    enum { ROOM = 1 << 20 };
    const joining *j = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        if (j->done[i] >= 0 && j->done[i] * j->writer->width == j->offsets[i]) continue;
        int in = open(j->parts[i], O_RDONLY | O_CLOEXEC);
        char *block = in < 0 ? NULL : ml_alloc(ROOM);
        ml_status status = in < 0   ? failed("open", j->parts[i])
                           : !block ? ml_fail(ML_NO_MEMORY, "not enough host memory")
                                    : copy_part(j, i, in, block, ROOM);
        ml_free(block);
        if (in >= 0) close(in);
        ML_CHECK(status);
    }
}

static ml_status take_part(ml_writer *w, const char *part) {
    bool closed = fclose(w->file) == 0;
    w->file = closed && rename(part, w->part) == 0 ? fopen(w->part, "r+be") : NULL;
    return w->file ? ML_OK : failed("write", w->part);
}

static ml_status join(joining *j, int count) {
    ml_writer *w = j->writer;
    struct stat about;
    for (int i = 0; i < count; i++) {
        if (stat(j->parts[i], &about) != 0) return failed("open", j->parts[i]);
        j->offsets[i + 1] = j->offsets[i] + about.st_size;
        if (w->format == ML_WRITE_MEGATRON) ML_TRY(read_lengths(w, j->parts[i]));
    }
    w->begin = w->tokens = j->offsets[count] / w->width;
    if (count == 1) return take_part(w, j->parts[0]);
    ml_pool *pool = ml_pool_new(count < ml_cpu_count() ? count : ml_cpu_count());
    if (!pool) return ml_fail(ML_NO_MEMORY, "not enough host memory to write %s", w->path);
    ml_status status = ml_pool_run(pool, count, count, copy_parts, j);
    ml_pool_free(pool);
    return status;
}

ml_status ml_writer_join(ml_writer *w, int count, char *const *parts, const int64_t *done) {
    joining j = {w, parts, ml_alloc(((size_t)count + 1) * sizeof *j.offsets), done};
    if (!j.offsets) return ml_fail(ML_NO_MEMORY, "not enough host memory to write %s", w->path);
    ml_status status = join(&j, count);
    ml_free(j.offsets);
    return status;
}

/* ---- The index ------------------------------------------------------------------------------- */

static ml_status write_numbers(const ml_writer *w, FILE *file, const char *path) {
    unsigned char head[34] = "MMIDIDX", word[8];
    put(head + 9, 1, 8);
    head[17] = (unsigned char)(w->width == 1 ? 1 : w->width == 2 ? 8 : 4);
    put(head + 18, (uint64_t)w->count, 8);
    put(head + 26, (uint64_t)w->count + 1, 8);
    ML_TRY(write_bytes(file, path, head, sizeof head));
    for (int64_t i = 0; i < w->count; i++) {
        put(word, (uint64_t)w->lengths[i], 4);
        ML_TRY(write_bytes(file, path, word, 4));
    }
    for (int64_t i = 0, at = 0; i < w->count; at += w->lengths[i++] * (int64_t)w->width) {
        put(word, (uint64_t)at, 8);
        ML_TRY(write_bytes(file, path, word, 8));
    }
    for (int64_t i = 0; i <= w->count; i++) {
        put(word, (uint64_t)i, 8);
        ML_TRY(write_bytes(file, path, word, 8));
    }
    return ML_OK;
}

static ml_status finish(const ml_writer *w, FILE *file, const char *path) {
    bool written = fflush(file) == 0 && (!w->synced || fsync(fileno(file)) == 0);
    return written ? ML_OK : failed("write", path);
}

static ml_status write_index(const ml_writer *w, const char *path) {
    FILE *file = fopen(path, "wbe");
    if (!file) return failed("write", path);
    ml_status status = write_numbers(w, file, path);
    if (status == ML_OK) status = finish(w, file, path);
    if (fclose(file) != 0 && status == ML_OK) status = failed("write", path);
    return status;
}

/* The .bin has its name first: one without its .idx is no Megatron file. */
static ml_status name_files(ml_writer *w, const char *part, const char *index) {
    if (w->format == ML_WRITE_MEGATRON) ML_TRY(write_index(w, part));
    if (rename(w->part, w->path) != 0) return failed("write", w->path);
    if (w->format == ML_WRITE_MEGATRON && rename(part, index) != 0) return failed("write", index);
    return ML_OK;
}

static ml_status complete(ml_writer *w) {
    char part[4096], index[4096];
    int base = (int)strlen(w->path) - 4;
    snprintf(index, sizeof index, "%.*s.idx", base, w->path);
    if (snprintf(part, sizeof part, "%s.part", index) >= (int)sizeof part)
        return ml_fail(ML_IO, "cannot write %s: the name is too long", w->path);
    ML_TRY(ml_writer_end_document(w));
    if (w->format == ML_WRITE_LLMC) {
        if (w->tokens > INT32_MAX)
            return ml_fail(ML_IO, "%s: 2^31 - 1 tokens are the most of llm.c's files", w->path);
        if (fseek(w->file, 0, SEEK_SET) != 0) return failed("write", w->part);
        ML_TRY(write_header(w));
    }
    ML_TRY(finish(w, w->file, w->part));
    ml_status status = name_files(w, part, index);
    if (status != ML_OK && w->format == ML_WRITE_MEGATRON) unlink(part);
    return status;
}

ml_status ml_writer_close(ml_writer *w, bool keep) {
    ml_status status = keep ? complete(w) : ML_OK;
    if (!keep || status != ML_OK) unlink(w->part);
    free_writer(w);
    return status;
}

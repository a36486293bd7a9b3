#include "runtime/data/writer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/memory.h"

enum { LLMC_HEADER = 1024 };

struct ml_writer {
    char *path, *part;
    FILE *file;
    ml_write_format format;
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
    w->format = format, w->width = width;
    w->file = fopen(w->part, "wbe");
    ml_status status = w->file ? ML_OK : failed("write", w->part);
    if (status == ML_OK && format == ML_WRITE_LLMC) status = write_header(w);
    if (status == ML_OK)
        *result = w;
    else
        free_writer(w);
    return status;
}

ml_status ml_writer_add(ml_writer *w, const uint32_t *ids, int64_t count) {
    enum { BLOCK = 4096 };
    unsigned char block[BLOCK * 4];
    uint32_t most = w->width < 4 ? (1u << 8 * w->width) - 1 : INT32_MAX;
    for (int64_t i = 0; i < count; i += BLOCK) {
        int64_t part = count - i < BLOCK ? count - i : BLOCK;
        for (int64_t k = 0; k < part; k++) {
            uint32_t id = ids[i + k];
            if (id > most) {
                ml_fail(ML_IO, "token %u does not fit the %d bytes of a token in %s", id, w->width,
                        w->path);
                return ml_help("write 4 bytes a token");
            }
            if (w->width == 1)
                block[k] = (unsigned char)id;
            else
                put(block + k * w->width, id, w->width);
        }
        ML_TRY(write_bytes(w->file, w->part, block, (size_t)(part * w->width)));
    }
    w->tokens += count;
    return ML_OK;
}

ml_status ml_writer_end_document(ml_writer *w) {
    int64_t length = w->tokens - w->begin;
    w->begin = w->tokens;
    if (w->format != ML_WRITE_MEGATRON || length == 0) return ML_OK;
    if (length > INT32_MAX)
        return ml_fail(ML_IO, "a document of %lld tokens in %s: 2^31 - 1 are the most",
                       (long long)length, w->path);
    if (w->count == w->capacity) {
        int64_t more = w->capacity ? 2 * w->capacity : 1024;
        int32_t *grown = ml_realloc(w->lengths, (size_t)w->capacity * 4, (size_t)more * 4);
        if (!grown) return ml_fail(ML_NO_MEMORY, "not enough host memory to write %s", w->path);
        w->lengths = grown, w->capacity = more;
    }
    w->lengths[w->count++] = (int32_t)length;
    return ML_OK;
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

static ml_status finish(FILE *file, const char *path) {
    return fflush(file) == 0 && fsync(fileno(file)) == 0 ? ML_OK : failed("write", path);
}

static ml_status write_index(const ml_writer *w, const char *path) {
    FILE *file = fopen(path, "wbe");
    if (!file) return failed("write", path);
    ml_status status = write_numbers(w, file, path);
    if (status == ML_OK) status = finish(file, path);
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
    ML_TRY(finish(w->file, w->part));
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

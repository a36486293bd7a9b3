#include "runtime/data/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/knobs.h"
#include "runtime/base/memory.h"
#include "runtime/data/encode.h"
#include "runtime/data/writer.h"
#include "runtime/io/file.h"

enum { FORMAT = 1 }; /* of entries: another number where their content changes */

static ml_status no_folder(const char *path, const char *reason) {
    ml_fail(ML_IO, "the tokens of text cannot be kept in %s: %s", path, reason);
    return ml_help("MLUA_CACHE=DIR names another folder");
}

static ml_status make_folder(char *path, size_t size) {
    const char *cache = ml_knobs()->cache, *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int length = cache && cache[0]        ? snprintf(path, size, "%s/tokens", cache)
                 : xdg && xdg[0] == '/'   ? snprintf(path, size, "%s/mlua/tokens", xdg)
                 : home && home[0] == '/' ? snprintf(path, size, "%s/.cache/mlua/tokens", home)
                                          : -1;
    if (length < 0) return no_folder("the cache", "neither MLUA_CACHE nor HOME is set");
    if ((size_t)length >= size - 64) return no_folder("the cache", "its path is too long");
    for (char *slash = path; (slash = strchr(slash + 1, '/'));) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    return mkdir(path, 0700) == 0 || errno == EEXIST ? ML_OK : no_folder(path, strerror(errno));
}

/* Of some blocks: a file that replaced another may have its size and time. */
static ml_status hash_blocks(const char *path, uint64_t *hash) {
    enum { BLOCKS = 4, BLOCK = 4096 };
    char block[BLOCK];
    ml_file file;
    ML_TRY(ml_file_open(path, &file));
    int64_t count = file.bytes < BLOCK ? file.bytes : BLOCK;
    ml_status status = ML_OK;
    for (int i = 0; i < BLOCKS && status == ML_OK; i++) {
        status = ml_file_read(&file, (file.bytes - count) / (BLOCKS - 1) * i, block, count);
        if (status == ML_OK) *hash = ml_hash(block, (size_t)count, *hash);
    }
    ml_file_close(&file);
    return status;
}

static ml_status name_entry(const char *path, const ml_tokenizer *tokenizer, char *out,
                            size_t size) {
    char whole[PATH_MAX];
    struct stat about;
    if (!realpath(path, whole) || stat(whole, &about) != 0)
        return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    int64_t key[] = {about.st_size, about.st_mtim.tv_sec, about.st_mtim.tv_nsec,
                     (int64_t)ml_tokenizer_hash(tokenizer), FORMAT};
    uint64_t hash = ml_hash(whole, strlen(whole), ml_hash(key, sizeof key, 0));
    ML_TRY(hash_blocks(whole, &hash));
    ML_TRY(make_folder(out, size));
    size_t length = strlen(out);
    snprintf(out + length, size - length, "/%016llx.bin", (unsigned long long)hash);
    return ML_OK;
}

/* ---- Making an entry ------------------------------------------------------------------------- */

typedef struct {
    const ml_tokenizer *tokenizer;
    ml_writer *writer;
    bool lines; /* tokens are bytes: documents end with a line */
} making;

static ml_status end_document(void *context, ml_ids *ids, int64_t first, bool ends) {
    const making *m = context;
    const int64_t eos = m->lines ? '\n' : ml_tokenizer_eos(m->tokenizer);
    const bool empty = ids->count == first;
    const bool ended = m->lines && !empty && ids->at[ids->count - 1] == '\n';
    return ends && eos >= 0 && !empty && !ended ? ml_ids_add(ids, (uint32_t)eos) : ML_OK;
}

static ml_status place_ids(void *context, const uint32_t *ids, int64_t count, bool ends) {
    const making *m = context;
    (void)ids;
    return ml_writer_place(m->writer, count, ends);
}

static ml_status write_ids(void *context, int file, int64_t at, const uint32_t *ids,
                           int64_t count) {
    const making *m = context;
    (void)file;
    return ml_writer_put(m->writer, at, ids, count);
}

/* What takes a while is said. */
static void say_large(const char *path) {
    enum { LARGE = 1 << 28 };
    struct stat about;
    if (stat(path, &about) == 0 && about.st_size > LARGE)
        fprintf(stderr, "mlua: makes tokens of %s (%.1f GiB), once\n", path,
                (double)about.st_size / 0x1p30);
}

static ml_status make_entry(const char *path, const ml_tokenizer *tokenizer, const char *entry) {
    int64_t vocab = ml_tokenizer_vocab(tokenizer);
    making m = {.tokenizer = tokenizer, .lines = vocab == 256 && ml_tokenizer_eos(tokenizer) < 0};
    say_large(path);
    int width = vocab <= 256 ? 1 : vocab <= 65536 ? 2 : 4;
    ML_TRY(ml_writer_open(entry, ML_WRITE_MEGATRON, width, &m.writer));
    encoding *e;
    encode_options options = {.tokenizer = tokenizer,
                              .finish = end_document,
                              .sink = place_ids,
                              .write = write_ids,
                              .context = &m};
    ml_status status = encode_open(&options, &e);
    if (status == ML_OK) status = encode_files(e, 1, (char *const[]){(char *)path});
    if (status == ML_OK && ml_writer_tokens(m.writer) == 0)
        status = ml_fail(ML_IO, "%s holds no text", path);
    encode_close(e);
    if (status == ML_OK) return ml_writer_close(m.writer, true);
    ml_error failed = *ml_error_last();
    ml_writer_close(m.writer, false);
    *ml_error_last() = failed;
    return status;
}

static bool is_whole(const char *entry) {
    char index[PATH_MAX];
    snprintf(index, sizeof index, "%.*s.idx", (int)strlen(entry) - 4, entry);
    return access(index, R_OK) == 0 && access(entry, R_OK) == 0;
}

ml_status cache_find(const char *path, const ml_tokenizer *tokenizer, char *out, size_t size) {
    ML_TRY(name_entry(path, tokenizer, out, size));
    return is_whole(out) ? ML_OK : ml_fail(ML_IO, "the tokens of %s are not made yet", path);
}

/* The lock is let go by closing it: also where a process dies. Without an entry its file stays: who
 * waits for it and who comes later then make the entry one after another. */
ml_status cache_tokens(const char *path, const ml_tokenizer *tokenizer, char *out, size_t size) {
    char lock[PATH_MAX];
    ML_TRY(name_entry(path, tokenizer, out, size));
    if (is_whole(out)) return ML_OK;
    if (snprintf(lock, sizeof lock, "%s.lock", out) >= (int)sizeof lock)
        return no_folder(out, "its path is too long");
    int held = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (held < 0) return no_folder(out, strerror(errno));
    while (flock(held, LOCK_EX) != 0 && errno == EINTR) {}
    ml_status status = is_whole(out) ? ML_OK : make_entry(path, tokenizer, out);
    if (status == ML_OK) unlink(lock);
    close(held);
    return status;
}

/* With an output each file's ids are first written beside it, in OUT.parts/, under a name made of
 * the file's path, size, time and the tokenizer: what an interrupted run finished is not done
 * again. */
#include "vm/cli/tokenize.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/memory.h"
#include "runtime/data/encode.h"
#include "runtime/data/text.h"
#include "runtime/data/writer.h"

#define DOCUMENT_END UINT32_MAX /* in files of OUT.parts/ */

typedef struct {
    const tokenize_options *options;
    ml_tokenizer *tokenizer; /* NULL: one is trained */
    encoding *encoding;
    FILE *part;       /* where ids are written; NULL with --json */
    const char *path; /* of the file that is read */
    int64_t bytes, tokens;
    double began, shown;
} tokenizing;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* A line that is written over on a terminal, and one a file elsewhere. */
static void show_progress(tokenizing *z, bool last) {
    bool terminal = isatty(STDERR_FILENO);
    double time = now(), seconds = time - z->began;
    if (z->options->quiet || z->options->json || (!last && (!terminal || time - z->shown < 0.5)))
        return;
    z->shown = time;
    char tokens[32] = "";
    if (!z->options->train) snprintf(tokens, sizeof tokens, " %lld tokens,", (long long)z->tokens);
    fprintf(stderr, "%s%s: %.1f MB,%s %.1f MB/s%s", terminal ? "\r\x1b[K" : "", z->path,
            (double)z->bytes / 1e6, tokens, seconds > 0 ? (double)z->bytes / 1e6 / seconds : 0,
            last ? "\n" : "");
}

static ml_status write_failed(const char *what) {
    return ml_fail(ML_IO, "cannot write %s: %s", what, strerror(errno));
}

static ml_status print_ids(const ml_ids *ids) {
    putchar('[');
    for (int64_t i = 0; i < ids->count; i++) printf(i ? ",%u" : "%u", ids->at[i]);
    puts("]");
    return ferror(stdout) ? write_failed("standard output") : ML_OK;
}

static ml_status take_ids(void *context, ml_ids *ids, bool ends) {
    tokenizing *z = context;
    if (z->options->json) return print_ids(ids);
    int64_t eos = ml_tokenizer_eos(z->tokenizer);
    if (ends && eos >= 0) ML_TRY(ml_ids_add(ids, (uint32_t)eos));
    z->tokens += ids->count;
    if (ends) ML_TRY(ml_ids_add(ids, DOCUMENT_END));
    size_t count = (size_t)ids->count;
    return fwrite(ids->at, sizeof *ids->at, count, z->part) == count ? ML_OK
                                                                     : write_failed("tokens");
}

static void add_progress(void *context, int64_t bytes) {
    tokenizing *z = context;
    z->bytes += bytes;
    show_progress(z, false);
}

static ml_status read_file(tokenizing *z, const char *path) {
    if (!text_is_name(path)) {
        ml_fail(ML_INVALID, "%s is no text file by its name", path);
        return ml_help("names end in .txt or .jsonl, and in .gz or .zst where they are compressed");
    }
    z->path = path;
    z->bytes = z->tokens = 0;
    z->began = z->shown = now();
    ML_TRY(encode_file(z->encoding, path));
    show_progress(z, true);
    return ML_OK;
}

/* ---- With an output -------------------------------------------------------------------------- */

static ml_status part_name(const tokenizing *z, const char *path, char name[PATH_MAX]) {
    struct stat about;
    if (stat(path, &about)) return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    int64_t key[] = {about.st_size, about.st_mtim.tv_sec, about.st_mtim.tv_nsec,
                     (int64_t)ml_tokenizer_hash(z->tokenizer), z->options->special};
    uint64_t hash = ml_hash(path, strlen(path), ml_hash(key, sizeof key, 0));
    int length =
        snprintf(name, PATH_MAX, "%s.parts/%016llx", z->options->out, (unsigned long long)hash);
    return length < PATH_MAX - 8 ? ML_OK : ml_fail(ML_INVALID, "%s is too long a name", path);
}

/* A file's ids, under its name once they are whole. */
static ml_status make_part(tokenizing *z, const char *path) {
    char name[PATH_MAX], unfinished[PATH_MAX + 8];
    ML_TRY(part_name(z, path, name));
    if (access(name, R_OK) == 0) {
        if (!z->options->quiet) fprintf(stderr, "%s: done before\n", path);
        return ML_OK;
    }
    snprintf(unfinished, sizeof unfinished, "%s.new", name);
    z->part = fopen(unfinished, "wb");
    if (!z->part) return write_failed(unfinished);
    ml_status status = read_file(z, path);
    bool closed = fclose(z->part) == 0;
    z->part = NULL;
    if (status != ML_OK) {
        unlink(unfinished);
        return status;
    }
    return closed && rename(unfinished, name) == 0 ? ML_OK : write_failed(unfinished);
}

static ml_status copy_part(const tokenizing *z, const char *path, ml_writer *writer) {
    char name[PATH_MAX];
    static uint32_t ids[1 << 16];
    ML_TRY(part_name(z, path, name));
    FILE *part = fopen(name, "rb");
    if (!part) return ml_fail(ML_IO, "cannot open %s: %s", name, strerror(errno));
    ml_status status = ML_OK;
    for (size_t count; status == ML_OK && (count = fread(ids, 4, 1 << 16, part)) > 0;)
        for (size_t i = 0, end; i < count && status == ML_OK; i = end + 1) {
            for (end = i; end < count && ids[end] != DOCUMENT_END;) end++;
            status = ml_writer_add(writer, ids + i, (int64_t)(end - i));
            if (status == ML_OK && end < count) status = ml_writer_end_document(writer);
        }
    fclose(part);
    return status;
}

/* All parts into the output, which has its name once it is whole; then the parts are removed. */
static ml_status join_parts(const tokenizing *z, int count, char **files) {
    char path[PATH_MAX], name[PATH_MAX];
    const char *out = z->options->out;
    size_t stem = strlen(out) - 4;
    bool index = strcmp(out + stem, ".idx") == 0;
    snprintf(path, sizeof path, "%.*s.bin", (int)stem, out);
    ml_writer *writer;
    ML_TRY(ml_writer_open(path, index ? ML_WRITE_MEGATRON : ML_WRITE_PLAIN,
                          ml_tokenizer_vocab(z->tokenizer) <= 65536 ? 2 : 4, &writer));
    ml_status status = ML_OK;
    for (int i = 0; i < count && status == ML_OK; i++) status = copy_part(z, files[i], writer);
    ml_status closed = ml_writer_close(writer, status == ML_OK);
    if (status == ML_OK) status = closed;
    if (status != ML_OK) return status;
    for (int i = 0; i < count; i++)
        if (part_name(z, files[i], name) == ML_OK) unlink(name);
    snprintf(name, sizeof name, "%s.parts", out);
    rmdir(name); /* not where another run's parts are in it */
    return ML_OK;
}

static ml_status write_output(tokenizing *z, int count, char **files) {
    const char *out = z->options->out, *suffix = strlen(out) > 4 ? out + strlen(out) - 4 : "";
    char folder[PATH_MAX];
    if (strcmp(suffix, ".bin") != 0 && strcmp(suffix, ".idx") != 0) {
        ml_fail(ML_INVALID, "%s is no name of a file of tokens", out);
        return ml_help("-o OUT.bin writes ids alone, -o OUT.idx Megatron's OUT.bin and OUT.idx");
    }
    if (snprintf(folder, sizeof folder, "%s.parts", out) >= PATH_MAX - 32)
        return ml_fail(ML_INVALID, "%.60s... is too long a name", out);
    if (mkdir(folder, 0777) && errno != EEXIST) return write_failed(folder);
    for (int i = 0; i < count; i++) ML_TRY(make_part(z, files[i]));
    return join_parts(z, count, files);
}

static ml_status start(tokenizing *z) {
    int flags = z->options->special ? ML_ENCODE_FRAME : 0;
    encode_options options = {z->tokenizer, flags, take_ids, add_progress, z};
    return encode_open(&options, &z->encoding);
}

static bool end(tokenizing *z, ml_status status) {
    encode_close(z->encoding);
    ml_tokenizer_close(z->tokenizer);
    return status == ML_OK;
}

static ml_status encode_files(tokenizing *z, int count, char **paths) {
    ML_TRY(ml_tokenizer_open(paths[0], &z->tokenizer));
    ML_TRY(start(z));
    if (z->options->out) return write_output(z, count - 1, paths + 1);
    for (int i = 1; i < count; i++) ML_TRY(read_file(z, paths[i]));
    return fflush(stdout) ? write_failed("standard output") : ML_OK;
}

bool tokenize_files(const tokenize_options *options, int count, char **paths) {
    tokenizing z = {.options = options};
    return end(&z, encode_files(&z, count, paths));
}

/* ---- Training -------------------------------------------------------------------------------- */

static ml_status print_merge(void *context, const char *token, size_t bytes, int64_t count) {
    const tokenizing *z = context;
    if (!z->options->json) return ML_OK;
    printf("{\"bytes\":[");
    for (size_t i = 0; i < bytes; i++) printf(i ? ",%u" : "%u", (unsigned char)token[i]);
    printf("],\"count\":%lld}\n", (long long)count);
    return ferror(stdout) ? write_failed("standard output") : ML_OK;
}

static ml_status write_text(const char *path, const ml_bytes *text) {
    char unfinished[PATH_MAX];
    if (snprintf(unfinished, PATH_MAX, "%s.part", path) >= PATH_MAX)
        return ml_fail(ML_INVALID, "%.60s... is too long a name", path);
    FILE *file = fopen(unfinished, "wb");
    if (!file) return write_failed(unfinished);
    bool whole = fwrite(text->at, 1, text->count, file) == text->count;
    return fclose(file) == 0 && whole && rename(unfinished, path) == 0 ? ML_OK : write_failed(path);
}

static ml_status train_on(tokenizing *z, int count, char **paths, ml_bytes *json) {
    int64_t made;
    const ml_words *words;
    ML_TRY(start(z));
    for (int i = 0; i < count; i++) ML_TRY(read_file(z, paths[i]));
    ML_TRY(encode_words(z->encoding, &words));
    ML_TRY(ml_train(words, z->options->train, print_merge, z, json, &made));
    ML_TRY(write_text(z->options->out, json));
    if (!z->options->quiet)
        fprintf(stderr, "%s: %lld tokens from %lld words%s\n", z->options->out, (long long)made,
                (long long)ml_words_count(words),
                made < z->options->train ? "; no other pair was seen twice" : "");
    return fflush(stdout) ? write_failed("standard output") : ML_OK;
}

bool tokenize_train(const tokenize_options *options, int count, char **paths) {
    tokenizing z = {.options = options};
    ml_bytes json = {0};
    ml_status status = train_on(&z, count, paths, &json);
    ml_bytes_free(&json);
    return end(&z, status);
}

/* With an output each file's ids are first written beside it, in OUT.parts/, as Megatron's files
 * under a name made of the file's path, size, time and the tokenizer: what an interrupted run
 * finished is not done again. */
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

typedef struct {
    const tokenize_options *options;
    ml_tokenizer *tokenizer; /* NULL: one is trained */
    encoding *encoding;
    ml_writer *part;  /* where ids are written; NULL with --json */
    char **paths;     /* of the files that are read */
    const char *path; /* of the one whose ids come */
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
    ML_TRY(ml_writer_add(z->part, ids->at, ids->count));
    return ends ? ml_writer_end_document(z->part) : ML_OK;
}

static void add_progress(void *context, int64_t bytes) {
    tokenizing *z = context;
    z->bytes += bytes;
    show_progress(z, false);
}

static ml_status part_name(const tokenizing *z, const char *path, char name[PATH_MAX]) {
    struct stat about;
    if (stat(path, &about)) return ml_fail(ML_IO, "cannot open %s: %s", path, strerror(errno));
    int64_t key[] = {about.st_size, about.st_mtim.tv_sec, about.st_mtim.tv_nsec,
                     (int64_t)ml_tokenizer_hash(z->tokenizer), z->options->special};
    uint64_t hash = ml_hash(path, strlen(path), ml_hash(key, sizeof key, 0));
    int length =
        snprintf(name, PATH_MAX, "%s.parts/%016llx.bin", z->options->out, (unsigned long long)hash);
    return length < PATH_MAX - 8 ? ML_OK : ml_fail(ML_INVALID, "%s is too long a name", path);
}

static void name_index(char name[PATH_MAX]) {
    strcpy(name + strlen(name) - 4, ".idx");
}

static int width(const tokenizing *z) {
    return ml_tokenizer_vocab(z->tokenizer) <= 65536 ? 2 : 4;
}

static ml_status open_part(tokenizing *z) {
    char name[PATH_MAX];
    ML_TRY(part_name(z, z->path, name));
    return ml_writer_open(name, ML_WRITE_PART, width(z), &z->part);
}

static ml_status check_names(int count, char **paths) {
    for (int i = 0; i < count; i++) {
        if (text_is_name(paths[i])) continue;
        ml_fail(ML_INVALID, "%s is no text file by its name", paths[i]);
        return ml_help("names end in .txt or .jsonl, and in .gz or .zst where they are compressed");
    }
    return ML_OK;
}

static ml_status begin_file(void *context, int file) {
    tokenizing *z = context;
    z->path = z->paths[file];
    z->bytes = z->tokens = 0;
    z->began = z->shown = now();
    return z->options->out && !z->options->train ? open_part(z) : ML_OK;
}

static ml_status end_file(void *context, int file) {
    tokenizing *z = context;
    (void)file;
    show_progress(z, true);
    ml_writer *part = z->part;
    z->part = NULL;
    return part ? ml_writer_close(part, true) : ML_OK;
}

static ml_status read_files(tokenizing *z, int count, char **paths) {
    ML_TRY(check_names(count, paths));
    z->paths = paths;
    return encode_files(z->encoding, count, paths);
}

/* ---- With an output -------------------------------------------------------------------------- */

/* Whether an earlier run made a file's part. */
static bool has_part(const tokenizing *z, const char *path, const char *name) {
    char index[PATH_MAX];
    name_index(strcpy(index, name));
    if (access(name, R_OK) != 0 || access(index, R_OK) != 0) return false;
    if (!z->options->quiet) fprintf(stderr, "%s: done before\n", path);
    return true;
}

/* All parts into the output, which has its name once it is whole; then the parts are removed. */
static ml_status join_parts(const tokenizing *z, int count, char **parts) {
    char path[PATH_MAX];
    const char *out = z->options->out;
    size_t stem = strlen(out) - 4;
    bool index = strcmp(out + stem, ".idx") == 0;
    snprintf(path, sizeof path, "%.*s.bin", (int)stem, out);
    ml_writer *writer;
    ML_TRY(ml_writer_open(path, index ? ML_WRITE_MEGATRON : ML_WRITE_PLAIN, width(z), &writer));
    ml_status status = ml_writer_join(writer, count, parts);
    ml_status closed = ml_writer_close(writer, status == ML_OK);
    if (status != ML_OK || closed != ML_OK) return status != ML_OK ? status : closed;
    for (int i = 0; i < count; i++) {
        unlink(parts[i]);
        name_index(parts[i]);
        unlink(parts[i]);
    }
    snprintf(path, sizeof path, "%s.parts", out);
    rmdir(path); /* not where another run's parts are in it */
    return ML_OK;
}

/* `left` has room for the files of which there is no part. */
static ml_status make_parts(tokenizing *z, int count, char **files, char **parts, char **left) {
    char name[PATH_MAX];
    int lefts = 0;
    struct stat about;
    for (int i = 0; i < count; i++) {
        if (stat(files[i], &about) == 0 && part_name(z, files[i], name) == ML_OK &&
            has_part(z, files[i], name))
            continue;
        left[lefts++] = files[i];
    }
    ML_TRY(read_files(z, lefts, left));
    for (int i = 0; i < count; i++) {
        ML_TRY(part_name(z, files[i], name));
        parts[i] = ml_alloc(strlen(name) + 1);
        if (!parts[i]) return ml_fail(ML_NO_MEMORY, "not enough host memory for %d files", count);
        strcpy(parts[i], name);
    }
    return join_parts(z, count, parts);
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
    char **parts = ml_alloc(2 * (size_t)count * sizeof *parts);
    if (!parts) return ml_fail(ML_NO_MEMORY, "not enough host memory for %d files", count);
    ml_status status = make_parts(z, count, files, parts, parts + count);
    for (int i = 0; i < count; i++) ml_free(parts[i]);
    ml_free(parts);
    return status;
}

static ml_status start(tokenizing *z) {
    int flags = z->options->special ? ML_ENCODE_FRAME : 0;
    encode_options options = {z->tokenizer, flags, take_ids, begin_file, end_file, add_progress, z};
    return encode_open(&options, &z->encoding);
}

static bool end(tokenizing *z, ml_status status) {
    ml_error failed = *ml_error_last();
    if (z->part) ml_writer_close(z->part, false);
    *ml_error_last() = failed;
    encode_close(z->encoding);
    ml_tokenizer_close(z->tokenizer);
    return status == ML_OK;
}

static ml_status make_tokens(tokenizing *z, int count, char **paths) {
    ML_TRY(ml_tokenizer_open(paths[0], &z->tokenizer));
    ML_TRY(start(z));
    if (z->options->out) return write_output(z, count - 1, paths + 1);
    ML_TRY(read_files(z, count - 1, paths + 1));
    return fflush(stdout) ? write_failed("standard output") : ML_OK;
}

bool tokenize_files(const tokenize_options *options, int count, char **paths) {
    tokenizing z = {.options = options};
    return end(&z, make_tokens(&z, count, paths));
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
    ML_TRY(read_files(z, count, paths));
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

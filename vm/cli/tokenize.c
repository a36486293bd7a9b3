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
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/memory.h"
#include "runtime/data/encode.h"
#include "runtime/data/text.h"
#include "runtime/data/writer.h"

/* With an output: a file of text, its part, and where that was put into the output too. */
typedef struct text_file {
    char *path, *part;
    const struct text_file *same; /* an earlier one of that part; NULL: none */
    ml_writer *writer;            /* of the part; NULL: it is whole, or not begun */
    int64_t tokens;               /* -1: not known yet */
    int64_t done;                 /* tokens of the output before it; -1: it is not there */
} text_file;

typedef struct {
    const tokenize_options *options;
    ml_tokenizer *tokenizer; /* NULL: one is trained */
    encoding *encoding;
    text_file *files; /* all of them */
    int count;
    ml_writer *output; /* NULL: none, or of one file, whose part becomes it */
    int64_t placed;    /* tokens in the output */
    int reached;       /* files before that one are in `placed` */
    char **paths;      /* of the files that are read */
    int *numbers;      /* theirs in `files` */
    const char *path;  /* of the one whose ids come */
    int64_t bytes, tokens;
    double began, shown;
} tokenizing;

/* A line that is written over on a terminal, and one a file elsewhere. */
static void show_progress(tokenizing *z, bool last) {
    bool terminal = isatty(STDERR_FILENO);
    double time = ml_clock_now(), seconds = time - z->began;
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

static ml_status print_ids(const uint32_t *ids, int64_t count) {
    putchar('[');
    for (int64_t i = 0; i < count; i++) printf(i ? ",%u" : "%u", ids[i]);
    puts("]");
    return ferror(stdout) ? write_failed("standard output") : ML_OK;
}

static text_file *file_of(const tokenizing *z, int number) {
    return &z->files[z->numbers[number]];
}

static ml_status end_document(void *context, ml_ids *ids, int64_t first, bool ends) {
    const tokenizing *z = context;
    const int64_t eos = ml_tokenizer_eos(z->tokenizer);
    (void)first;
    return ends && eos >= 0 ? ml_ids_add(ids, (uint32_t)eos) : ML_OK;
}

static ml_status take_ids(void *context, const uint32_t *ids, int64_t count, bool ends) {
    tokenizing *z = context;
    if (z->options->json) return print_ids(ids, count);
    z->tokens += count;
    return ml_writer_place(z->files[z->reached].writer, count, ends);
}

static ml_status write_ids(void *context, int number, int64_t at, const uint32_t *ids,
                           int64_t count) {
    const tokenizing *z = context;
    const text_file *file = file_of(z, number);
    ML_TRY(ml_writer_put(file->writer, at, ids, count));
    return z->output ? ml_writer_put(z->output, file->done + at, ids, count) : ML_OK;
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

static ml_status check_names(int count, char **paths) {
    for (int i = 0; i < count; i++) {
        if (text_is_name(paths[i])) continue;
        ml_fail(ML_INVALID, "%s is no text file by its name", paths[i]);
        return ml_help("names end in .txt or .jsonl, and in .gz or .zst where they are compressed");
    }
    return ML_OK;
}

/* Where a file begins in the output: behind earlier ones, those that are not read too. */
static void reach_file(tokenizing *z, int number) {
    for (; z->reached < number; z->reached++) {
        const text_file *file = &z->files[z->reached];
        z->placed += (file->same ? file->same : file)->tokens;
    }
    z->files[number].done = z->placed;
}

static ml_status begin_file(void *context, int number) {
    tokenizing *z = context;
    z->path = z->paths[number];
    z->bytes = z->tokens = 0;
    z->began = z->shown = ml_clock_now();
    if (!z->files) return ML_OK;
    reach_file(z, z->numbers[number]);
    text_file *file = file_of(z, number);
    if (!file->part) return ml_fail(ML_IO, "%s was not there before", file->path);
    return ml_writer_open(file->part, ML_WRITE_PART, width(z), &file->writer);
}

static ml_status leave_file(void *context, int number) {
    tokenizing *z = context;
    show_progress(z, true);
    if (z->files) file_of(z, number)->tokens = ml_writer_tokens(file_of(z, number)->writer);
    return ML_OK;
}

static ml_status end_file(void *context, int number) {
    const tokenizing *z = context;
    if (!z->files) return ML_OK;
    ml_writer *writer = file_of(z, number)->writer;
    file_of(z, number)->writer = NULL;
    return ml_writer_close(writer, true);
}

static ml_status read_files(tokenizing *z, int count, char **paths) {
    ML_TRY(check_names(count, paths));
    z->paths = paths;
    return encode_files(z->encoding, count, paths);
}

/* ---- With an output -------------------------------------------------------------------------- */

/* Whether an earlier run made a file's part. */
static bool has_part(const tokenizing *z, text_file *file) {
    char index[PATH_MAX];
    struct stat about;
    name_index(strcpy(index, file->part));
    if (stat(file->part, &about) != 0 || access(index, R_OK) != 0) return false;
    if (!z->options->quiet) fprintf(stderr, "%s: done before\n", file->path);
    file->tokens = about.st_size / width(z);
    return true;
}

static int by_part(const void *left, const void *right) {
    const text_file *a = *(text_file *const *)left, *b = *(text_file *const *)right;
    int order = strcmp(a->part, b->part);
    return order ? order : a < b ? -1 : a > b;
}

/* Files that are named twice are read once. */
static ml_status find_same(tokenizing *z) {
    text_file **sorted = ml_alloc((size_t)z->count * sizeof *sorted);
    if (!sorted) return ml_fail(ML_NO_MEMORY, "not enough host memory for %d files", z->count);
    int parts = 0;
    for (int i = 0; i < z->count; i++)
        if (z->files[i].part) sorted[parts++] = &z->files[i];
    qsort(sorted, (size_t)parts, sizeof *sorted, by_part);
    for (int i = 1; i < parts; i++)
        if (strcmp(sorted[i]->part, sorted[i - 1]->part) == 0)
            sorted[i]->same = sorted[i - 1]->same ? sorted[i - 1]->same : sorted[i - 1];
    ml_free(sorted);
    return ML_OK;
}

static ml_status open_output(tokenizing *z) {
    char path[PATH_MAX];
    const char *out = z->options->out;
    size_t stem = strlen(out) - 4;
    bool index = strcmp(out + stem, ".idx") == 0;
    snprintf(path, sizeof path, "%.*s.bin", (int)stem, out);
    return ml_writer_open(path, index ? ML_WRITE_MEGATRON : ML_WRITE_PLAIN, width(z), &z->output);
}

/* All parts into the output, which has its name once it is whole; then the parts are removed. */
static ml_status join_parts(tokenizing *z, char **parts, int64_t *done) {
    char path[PATH_MAX];
    for (int i = 0; i < z->count; i++) parts[i] = z->files[i].part, done[i] = z->files[i].done;
    if (!z->output) ML_TRY(open_output(z));
    ML_TRY(ml_writer_join(z->output, z->count, parts, done));
    ml_writer *output = z->output;
    z->output = NULL;
    ML_TRY(ml_writer_close(output, true));
    for (int i = 0; i < z->count; i++) {
        unlink(parts[i]);
        name_index(parts[i]);
        unlink(parts[i]);
    }
    snprintf(path, sizeof path, "%s.parts", z->options->out);
    rmdir(path); /* not where another run's parts are in it */
    return ML_OK;
}

/* One that is not there has none: reading says so. */
static ml_status name_part(const tokenizing *z, text_file *file) {
    char name[PATH_MAX];
    struct stat about;
    file->done = file->tokens = -1;
    if (stat(file->path, &about) != 0) return ML_OK;
    ML_TRY(part_name(z, file->path, name));
    file->part = ml_alloc(strlen(name) + 1);
    if (!file->part) return ml_fail(ML_NO_MEMORY, "not enough host memory for %s", file->path);
    strcpy(file->part, name);
    return ML_OK;
}

/* The files of which there is no part are read. */
static ml_status make_parts(tokenizing *z) {
    int lefts = 0;
    for (int i = 0; i < z->count; i++) ML_TRY(name_part(z, &z->files[i]));
    ML_TRY(find_same(z));
    for (int i = 0; i < z->count; i++) {
        text_file *file = &z->files[i];
        if (file->same || (file->part && has_part(z, file))) continue;
        z->numbers[lefts] = i;
        z->paths[lefts++] = file->path;
    }
    if (z->count > 1) ML_TRY(open_output(z));
    return read_files(z, lefts, z->paths);
}

static ml_status write_files(tokenizing *z, char **names, int64_t *done) {
    for (int i = 0; i < z->count; i++) z->files[i].path = names[i];
    ML_TRY(make_parts(z));
    return join_parts(z, z->paths, done);
}

static ml_status write_output(tokenizing *z, int count, char **names) {
    const char *out = z->options->out, *suffix = strlen(out) > 4 ? out + strlen(out) - 4 : "";
    char folder[PATH_MAX];
    if (strcmp(suffix, ".bin") != 0 && strcmp(suffix, ".idx") != 0) {
        ml_fail(ML_INVALID, "%s is no name of a file of tokens", out);
        return ml_help("-o OUT.bin writes ids alone, -o OUT.idx Megatron's OUT.bin and OUT.idx");
    }
    if (snprintf(folder, sizeof folder, "%s.parts", out) >= PATH_MAX - 32)
        return ml_fail(ML_INVALID, "%.60s... is too long a name", out);
    if (mkdir(folder, 0777) && errno != EEXIST) return write_failed(folder);
    z->count = count;
    z->files = ml_alloc((size_t)count * sizeof *z->files);
    z->paths = ml_alloc((size_t)count * sizeof *z->paths);
    z->numbers = ml_alloc((size_t)count * sizeof *z->numbers);
    int64_t *done = ml_alloc((size_t)count * sizeof *done);
    ml_status status = z->files && z->paths && z->numbers && done
                           ? write_files(z, names, done)
                           : ml_fail(ML_NO_MEMORY, "not enough host memory for %d files", count);
    ml_free(done);
    return status;
}

/* What was begun and is not whole is removed. */
static void free_files(tokenizing *z) {
    for (int i = 0; z->files && i < z->count; i++) {
        if (z->files[i].writer) ml_writer_close(z->files[i].writer, false);
        ml_free(z->files[i].part);
    }
    if (z->output) ml_writer_close(z->output, false);
    if (z->files) ml_free(z->paths);
    ml_free(z->numbers);
    ml_free(z->files);
}

static ml_status start(tokenizing *z) {
    const bool written = z->options->out && !z->options->train;
    return encode_open(&(encode_options){.tokenizer = z->tokenizer,
                                         .flags = z->options->special ? ML_ENCODE_FRAME : 0,
                                         .begin = begin_file,
                                         .finish = written ? end_document : NULL,
                                         .sink = take_ids,
                                         .leave = leave_file,
                                         .write = written ? write_ids : NULL,
                                         .end = end_file,
                                         .progress = add_progress,
                                         .context = z},
                       &z->encoding);
}

static bool end(tokenizing *z, ml_status status) {
    ml_error failed = *ml_error_last();
    encode_close(z->encoding);
    free_files(z);
    *ml_error_last() = failed;
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

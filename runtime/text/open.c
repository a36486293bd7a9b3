/* Opening a tokenizer by its path. */
#include "runtime/text/tokenizer.h"

#include <string.h>
#include <sys/stat.h>

#include "runtime/base/memory.h"
#include "runtime/io/file.h"
#include "runtime/text/load.h"
#include "runtime/text/model.h"
#include "runtime/text/normalize.h"
#include "runtime/text/regex.h"
#include "runtime/text/unicode.h"

typedef struct {
    ml_tokenizer *t;
    const char *text;
    size_t bytes;
    json_t *root, *config; /* tokenizer.json and tokenizer_config.json, NULL where there is none */
    regex_matcher *matcher;
    ml_bytes scratch[2];
} reading;

/* Texts of added tokens that are found in normalized text. */
static void normalize_added(reading *r) {
    text_added_set *set = &r->t->added_normalized;
    for (uint32_t i = 0; i < set->list.count; i++) {
        text_string *text = &set->list.at[i].text;
        int at = 0;
        ML_CHECK(normalize_text(r->t, r->matcher, text->at, text->bytes, r->scratch, &at));
        if (!r->scratch[at].count) continue;
        *text = text_copy(r->t->arena, r->scratch[at].at, r->scratch[at].count);
        text_string raw = *text; /* the library decodes it to that as well */
        if (r->t->byte_level && !text_unmap(r->t->arena, *text, &raw)) raw = *text;
        if (r->t->normals.count) r->t->tokens[set->list.at[i].id].raw = raw;
    }
    load_sort_added(set);
}

static void make_byte_tokens(ml_tokenizer *t) {
    t->hash = ml_hash("bytes", 5, 0);
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        text_set(t, (uint32_t)i, text_copy(t->arena, &byte, 1), TOKEN_VOCAB);
    }
    text_index(t);
    t->bos = t->eos = -1;
}

static void build(void *argument) {
    reading *r = argument;
    ml_tokenizer *t = r->t;
    unicode_init();
    if (!r->text) {
        make_byte_tokens(t);
        return;
    }
    t->hash = ml_hash(r->text, r->bytes, 0);
    bool model = !r->root && !load_is_tiktoken(r->text, r->bytes);
    if (r->root)
        load_json(t, r->root);
    else if (model)
        load_model(t, r->text, r->bytes);
    else
        load_tiktoken(t, r->text, r->bytes);
    if (!model) load_ends(t, r->config); /* a .model says it itself */
    bpe_prepare(t);
    normalize_prepare(t);
    if (!model) normalize_added(r); /* SentencePiece's are as the model has them */
}

/* The whole file, in *text; a final 0 follows. */
static ml_status read_file(const char *path, char **text, size_t *bytes) {
    ml_file file;
    ML_TRY(ml_file_open(path, &file));
    *bytes = (size_t)file.bytes;
    *text = file.bytes < INT32_MAX ? ml_alloc(*bytes + 1) : NULL;
    ml_status status = *text ? ml_file_read(&file, 0, *text, file.bytes)
                             : ml_fail(ML_NO_MEMORY, "not enough host memory to read %s", path);
    ml_file_close(&file);
    if (status == ML_OK) return ML_OK;
    ml_free(*text);
    *text = NULL;
    return status;
}

/* The file of a folder, or `path` itself. */
static const char *find_file(ml_arena *arena, const char *path) {
    static const char *const names[] = {"tokenizer.json", "tokenizer.model", "qwen.tiktoken"};
    struct stat about;
    if (stat(path, &about) || !S_ISDIR(about.st_mode)) return path;
    for (int i = 0; i < 3; i++) {
        const char *file = ml_arena_format(arena, "%s/%s", path, names[i]);
        if (!stat(file, &about)) return file;
    }
    ml_raise(ML_IO, "%s holds no tokenizer.json, tokenizer.model or qwen.tiktoken", path);
}

/* What stands beside the file and says which tokens begin and end a text; NULL where nothing does.
 */
static json_t *read_config(ml_arena *arena, const char *file) {
    const char *slash = strrchr(file, '/');
    return json_load_file(ml_arena_format(arena, "%.*stokenizer_config.json",
                                          slash ? (int)(slash - file + 1) : 0, file),
                          JSON_DECODE_INT_AS_REAL, NULL); /* model_max_length: 10^30 */
}

typedef struct {
    ml_tokenizer *t;
    const char *path, *file;
} finding;

static void find(void *argument) {
    finding *f = argument;
    f->t->name = ml_arena_copy(f->t->arena, f->path, strlen(f->path));
    f->file = find_file(f->t->arena, f->path);
}

static ml_status read_tokenizer(ml_tokenizer *t, const char *path) {
    finding found = {t, path, NULL};
    char *text = NULL;
    reading r = {.t = t};
    ML_TRY(ml_protect(find, &found));
    if (strcmp(path, "bytes") != 0) {
        ML_TRY(read_file(found.file, &text, &r.bytes));
        r.text = text;
        size_t space = strspn(text, " \t\r\n");
        if (text[space] == '{') {
            json_error_t problem;
            r.root = json_loadb(text, r.bytes, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &problem);
            if (!r.root) {
                ml_free(text);
                return ml_fail(ML_INVALID, "%s is no JSON: line %d: %.200s", found.file,
                               problem.line, problem.text);
            }
        } else if (!load_is_tiktoken(text, r.bytes) && !load_is_model(text, r.bytes)) {
            ml_free(text);
            ml_fail(ML_INVALID, "%s is not a tokenizer that is known", found.file);
            return ml_help("a tokenizer.json, a .tiktoken file, a SentencePiece .model or a folder "
                           "that holds one");
        }
        r.config = read_config(t->arena, found.file);
    }
    ml_status status = ml_fail(ML_NO_MEMORY, "not enough host memory to open %s", path);
    if ((r.matcher = regex_matcher_new())) status = ml_protect(build, &r);
    regex_matcher_free(r.matcher);
    for (int i = 0; i < 2; i++) ml_bytes_free(&r.scratch[i]);
    json_decref(r.root);
    json_decref(r.config);
    ml_free(text);
    if (status == ML_INVALID) {
        char why[4096], help[1024];
        snprintf(why, sizeof why, "%s", ml_error_last()->text);
        snprintf(help, sizeof help, "%s", ml_error_last()->help);
        ml_fail(status, "cannot use the tokenizer %.500s: %.3000s", found.file, why);
        if (*help) ml_help("%s", help);
    }
    return status;
}

ml_status ml_tokenizer_open(const char *path, ml_tokenizer **result) {
    *result = NULL;
    ml_tokenizer *t = ml_alloc(sizeof *t);
    if (t) t->arena = ml_arena_new();
    if (!t || !t->arena) {
        ml_free(t);
        return ml_fail(ML_NO_MEMORY, "not enough host memory to open the tokenizer %s", path);
    }
    ml_status status = read_tokenizer(t, path);
    if (status == ML_OK)
        *result = t;
    else
        ml_tokenizer_close(t);
    return status;
}

#include "codegen/kernels/files.h"

#include <string.h>

#include "runtime/base/status.h"

const ml_kernel_file *ml_kernel_file_find(const char *name, size_t length) {
    for (const ml_kernel_file *file = ml_kernel_files; file->name; file++) {
        const char *last = strrchr(file->name, '/') + 1;
        if (strlen(last) == length && memcmp(last, name, length) == 0) return file;
    }
    ml_raise(ML_INTERNAL, "there is no kernel source %.*s", (int)length, name);
}

typedef struct {
    const char *at;
    size_t length;
} word;
typedef ML_VEC(word) words;

typedef struct {
    ml_arena *arena;
    ML_VEC(const ml_kernel_file *) files; /* read so far */
    words parameters;                     /* that examples declare */
    words macros;                         /* that the files define for themselves */
    ml_text *text;                        /* NULL: parameters alone are wanted */
} reader;

static bool is_word(char c) {
    return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

static word word_at(const char *at) {
    word w = {at, 0};
    while (is_word(at[w.length])) w.length++;
    return w;
}

static bool is(word w, const char *name) {
    return strlen(name) == w.length && memcmp(w.at, name, w.length) == 0;
}

static void add_once(ml_arena *arena, words *all, word w) {
    for (uint32_t i = 0; i < all->count; i++)
        if (all->at[i].length == w.length && memcmp(all->at[i].at, w.at, w.length) == 0) return;
    *ML_PUSH(arena, all) = w;
}

/* The directive of the line at `at`, and where its argument begins; empty where it is none. */
static word directive(const char *at, const char **argument) {
    if (*at != '#') return (word){at, 0};
    at += 1 + strspn(at + 1, " ");
    word w = word_at(at);
    *argument = at + w.length + strspn(at + w.length, " ");
    return w;
}

/* The last part of the path before a quotation mark. */
static word included(const char *path) {
    word name = {path, strcspn(path, "\"")};
    for (size_t i = 0, all = name.length; i < all; i++)
        if (path[i] == '/') name = (word){path + i + 1, all - i - 1};
    return name;
}

static const char *next_line(const char *at) {
    const char *end = strchr(at, '\n');
    return end ? end + 1 : at + strlen(at);
}

static const char *next_directive(const char *at) {
    const char *mark = strstr(at, "\n#");
    return mark ? mark + 1 : at + strlen(at);
}

/* From behind #ifndef MLUA_EMBEDDED to behind its #endif. */
static const char *read_examples(reader *r, const char *at) {
    for (int depth = 1; depth > 0 && *at; at = next_line(at)) {
        const char *argument;
        word w = directive(at, &argument);
        if (is(w, "if") || is(w, "ifdef") || is(w, "ifndef")) depth++;
        if (is(w, "endif")) depth--;
        if (is(w, "define")) add_once(r->arena, &r->parameters, word_at(argument));
    }
    return at;
}

static void read_file(reader *r, const ml_kernel_file *file) {
    for (uint32_t i = 0; i < r->files.count; i++)
        if (r->files.at[i] == file) return;
    *ML_PUSH(r->arena, &r->files) = file;
    bool placed = false; /* the text so far ends with the line before this one */
    int line = 1;
    for (const char *at = file->text, *next; *at; at = next) {
        const char *argument = "";
        word w = directive(at, &argument);
        bool examples = is(w, "ifndef") && is(word_at(argument), "MLUA_EMBEDDED");
        bool include = is(w, "include");
        bool pasted = !examples && !include && !(is(w, "pragma") && is(word_at(argument), "once"));
        next = r->text ? next_line(at) : next_directive(at);
        if (examples) next = read_examples(r, next_line(at));
        if (include) {
            word name = included(argument + 1);
            read_file(r, ml_kernel_file_find(name.at, name.length));
        }
        if (!r->text) continue;
        if (pasted && is(w, "define")) add_once(r->arena, &r->macros, word_at(argument));
        if (pasted && !placed) ml_text_add(r->text, "#line %d \"%s\"\n", line, file->name);
        if (pasted) ml_text_add(r->text, "%.*s", (int)(next - at), at);
        placed = pasted;
        for (; at < next; at++) line += *at == '\n';
    }
}

static const ml_parameter *value_of(const ml_parameter *values, uint32_t count, word name) {
    for (uint32_t i = count; i-- > 0;)
        if (strncmp(values[i].name, name.at, name.length) == 0 &&
            !is_word(values[i].name[name.length]))
            return &values[i];
    return NULL;
}

const ml_file_recipe *files_choose(ml_arena *arena, const char *file, const ml_parameter *values,
                                   uint32_t count) {
    reader r = {.arena = arena};
    ml_file_recipe *recipe = ML_NEW(arena, ml_file_recipe);
    recipe->file = ml_kernel_file_find(file, strlen(file));
    recipe->key = ml_hash(file, strlen(file), 0);
    read_file(&r, recipe->file);
    ml_parameter *parameters = ML_NEW_ARRAY(arena, ml_parameter, r.parameters.count);
    for (uint32_t i = 0; i < r.parameters.count; i++) {
        word name = r.parameters.at[i];
        if (is(name, "ENTRY")) continue;
        const ml_parameter *p = value_of(values, count, name);
        if (!p)
            ml_raise(ML_INTERNAL, "%s has a parameter %.*s, which nothing sets", file,
                     (int)name.length, name.at);
        parameters[recipe->count++] = *p;
        recipe->key = ml_hash(p->name, strlen(p->name) + 1, recipe->key);
        recipe->key = ml_hash(p->value, strlen(p->value) + 1, recipe->key);
    }
    recipe->parameters = parameters;
    return recipe;
}

static void define(ml_text *out, const ml_parameter *p) {
    ml_text_add(out, "#define %s ", p->name);
    for (const char *line = p->value; *line; line = next_line(line)) {
        int length = (int)strcspn(line, "\n");
        ml_text_add(out, line[length] ? "%.*s \\\n" : "%.*s", length, line);
    }
    ml_text_add(out, "\n");
}

char *files_print(const ml_file_recipe *recipe, const char *entry, ml_arena *arena) {
    ml_text body = {.arena = arena}, out = {.arena = arena};
    reader r = {.arena = arena, .text = &body};
    bool cuda = strstr(recipe->file->name, ".cu") != NULL;
    read_file(&r, recipe->file);
    ml_text_add(&out, "#define ENTRY %s\n", entry);
    for (uint32_t i = 0; i < recipe->count; i++) {
        define(&out, &recipe->parameters[i]);
        add_once(arena, &r.macros, word_at(recipe->parameters[i].name));
    }
    if (cuda) ml_text_add(&out, "namespace NAME(kernel) {\n");
    ml_text_add(&out, "%s%s#undef ENTRY\n", body.text, cuda ? "}\n" : "");
    for (uint32_t i = 0; i < r.macros.count; i++)
        ml_text_add(&out, "#undef %.*s\n", (int)r.macros.at[i].length, r.macros.at[i].at);
    return out.text;
}

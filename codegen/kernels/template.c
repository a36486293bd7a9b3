#include "codegen/kernels/template.h"

#include <stdio.h>
#include <string.h>

void template_set_text(ml_template *t, const char *name, const char *text) {
    ml_parameter *entry = ML_PUSH(t->arena, &t->entries);
    entry->name = name;
    entry->value = text;
}

void template_set(ml_template *t, const char *name, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length < 0 || length >= (int)sizeof text)
        ml_raise(ML_INTERNAL, "the text of a kernel's parameter %s is too long", name);
    template_set_text(t, name, ml_arena_copy(t->arena, text, (size_t)length));
}

const char *template_get(const ml_template *t, const char *name) {
    for (uint32_t i = t->entries.count; i-- > 0;)
        if (strcmp(t->entries.at[i].name, name) == 0) return t->entries.at[i].value;
    ml_raise(ML_INTERNAL, "a kernel's parameter %s is wanted, which nothing sets", name);
}

ml_template template_begin(ml_schedule *s) {
    s->expansions.index.arena = s->expansions.settings.arena = s->arena;
    return (ml_template){.arena = s->arena, .known = &s->expansions};
}

static const char *print(const ml_kernel *kernel, ml_arena *arena) {
    return files_print(kernel->recipe, kernel->entry, arena);
}

static uint64_t hash_settings(const ml_template *t, const char *file) {
    uint64_t hash = ml_hash(file, strlen(file), 0);
    for (uint32_t i = 0; i < t->entries.count; i++) {
        const ml_parameter *p = &t->entries.at[i];
        hash = ml_hash(p->name, strlen(p->name) + 1, hash);
        hash = ml_hash(p->value, strlen(p->value) + 1, hash);
    }
    return hash;
}

/* The number of the file's kernel among those known. Which parameters it declares is read from its
 * text once for equal settings. */
static uint32_t find_kernel(ml_template *t, const char *file) {
    uint64_t settings = hash_settings(t, file);
    uint32_t cursor = 0, at = ml_index_next(&t->known->settings, settings, &cursor);
    if (at != ML_INDEX_NONE) return at;
    const ml_file_recipe *recipe = files_choose(t->arena, file, t->entries.at, t->entries.count);
    cursor = 0;
    at = ml_index_next(&t->known->index, recipe->key, &cursor);
    if (at == ML_INDEX_NONE) {
        ml_kernel *k = ML_NEW(t->arena, ml_kernel);
        k->key = recipe->key;
        k->entry = ml_arena_format(t->arena, "ml_%016llx", (unsigned long long)k->key);
        k->recipe = recipe;
        k->early = strstr(recipe->file->text, "kernel_begins();") != NULL;
        at = t->known->kernels.count;
        ml_index_add(&t->known->index, k->key, at);
        *ML_PUSH(t->arena, &t->known->kernels) = k;
    }
    ml_index_add(&t->known->settings, settings, at);
    return at;
}

ml_kernel *template_file(ml_template *t, const char *file, const char *label, int pointers) {
    uint32_t at = find_kernel(t, file);
    const ml_kernel *same = t->known->kernels.at[at];
    ml_kernel *k = ML_NEW(t->arena, ml_kernel);
    k->key = same->key;
    k->entry = same->entry;
    k->recipe = same->recipe;
    k->print = print;
    k->early = same->early;
    k->contracts = true;
    k->label = label;
    k->pointer_count = pointers;
    k->units = k->grain = 1;
    return k;
}

void template_launch(ml_kernel *k, int64_t x, int64_t y, int64_t z, uint32_t block,
                     int64_t shared_bytes) {
    if (x > INT32_MAX || y > 65535 || z > 65535)
        ml_raise(ML_INVALID, "a %s kernel would need a grid of %lld x %lld x %lld blocks", k->label,
                 (long long)x, (long long)y, (long long)z);
    k->grid[0] = (uint32_t)x;
    k->grid[1] = (uint32_t)y;
    k->grid[2] = (uint32_t)z;
    k->block = block;
    k->shared_bytes = (uint32_t)shared_bytes;
}

void template_loop_add(ml_template_loops *loops, int64_t size, int64_t stride) {
    if (size == 1) return;
    if (loops->count > 0) {
        int last = loops->count - 1;
        if (loops->stride[last] == stride * size) {
            loops->size[last] *= size;
            loops->stride[last] = stride;
            return;
        }
    }
    loops->size[loops->count] = size;
    loops->stride[loops->count++] = stride;
}

const char *template_offset(ml_arena *arena, const ml_template_loops *loops, const char *index) {
    ml_text out = {.arena = arena};
    ml_text_add(&out, "(");
    int64_t below = 1; /* elements of the loops inside loop i */
    int terms = 0;
    for (int i = loops->count - 1; i >= 0; i--) {
        if (loops->stride[i] != 0) {
            if (terms++) ml_text_add(&out, " + ");
            if (below > 1)
                ml_text_add(&out, "%s / %lld", index, (long long)below);
            else
                ml_text_add(&out, "%s", index);
            if (i > 0) ml_text_add(&out, " %% %lld", (long long)loops->size[i]);
            if (loops->stride[i] != 1) ml_text_add(&out, " * %lldLL", (long long)loops->stride[i]);
        }
        below *= loops->size[i];
    }
    ml_text_add(&out, terms ? ")" : "0)");
    return out.text;
}

int template_workspace(ml_schedule *s, ml_step *step, ml_dtype dtype, int64_t elements) {
    uint32_t storage = s->storages.count;
    ml_storage *memory = ML_PUSH(s->arena, &s->storages);
    memory->kind = ML_STORAGE_TEMPORARY;
    memory->bytes = elements * ml_dtypes[dtype].bytes;
    uint32_t id = s->values.count;
    ml_value *value = ML_PUSH(s->arena, &s->values);
    value->storage = storage;
    value->type.dtype = (uint8_t)dtype;
    value->type.rank = 1;
    value->type.size[0] = elements;
    value->stride[0] = 1;

    int count = step->read_count + step->write_count;
    uint32_t *values = ML_NEW_ARRAY(s->arena, uint32_t, count + 1);
    memcpy(values, step->values, sizeof *values * (size_t)count);
    values[count] = id;
    step->values = values;
    uint64_t *may_alias = ML_NEW_ARRAY(s->arena, uint64_t, step->write_count + 1);
    if (step->may_alias)
        memcpy(may_alias, step->may_alias, sizeof *may_alias * (size_t)step->write_count);
    step->may_alias = may_alias;
    step->write_count++;
    return count;
}

const ml_value *template_value(const ml_schedule *s, const ml_step *step, int i) {
    return &s->values.at[step->values[i]];
}

const char *template_load(ml_arena *arena, ml_dtype dtype, const char *element) {
    const char *load = ml_dtypes[dtype].load;
    return *load ? ml_arena_format(arena, "%s(%s)", load, element) : element;
}

#define _GNU_SOURCE /* qsort_r */
#include "runtime/text/load.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/text/regex.h"

const char *load_text(const json_t *object, const char *key, const char *fallback) {
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value)) return fallback;
    if (!json_is_string(value)) ml_raise(ML_INVALID, "its field %s must be a text", key);
    return json_string_value(value);
}

bool load_flag(const json_t *object, const char *key, bool fallback) {
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value)) return fallback;
    if (!json_is_boolean(value)) ml_raise(ML_INVALID, "its field %s must be true or false", key);
    return json_is_true(value);
}

static int by_text(const void *a, const void *b) {
    const text_string *x = &((const text_added *)a)->text, *y = &((const text_added *)b)->text;
    int order = memcmp(x->at, y->at, x->bytes < y->bytes ? x->bytes : y->bytes);
    return order ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

void load_sort_added(text_added_set *set) {
    if (set->list.count) qsort(set->list.at, set->list.count, sizeof *set->list.at, by_text);
    for (uint32_t i = 0; i < set->list.count; i++) {
        unsigned char first = (unsigned char)set->list.at[i].text.at[0];
        set->only = i == 0 || set->only == first ? first : -1;
        set->first[first] = true;
    }
}

static int by_bytes(const void *a, const void *b, void *tokens) {
    const text_string *x = &((const text_token *)tokens)[*(const uint32_t *)a].text;
    const text_string *y = &((const text_token *)tokens)[*(const uint32_t *)b].text;
    int order = memcmp(x->at, y->at, x->bytes < y->bytes ? x->bytes : y->bytes);
    return order ? order : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

void load_sort_tokens(ml_tokenizer *t) {
    t->sorted = ML_NEW_ARRAY(t->arena, uint32_t, t->vocab + 1);
    for (uint32_t id = 0; id < t->vocab; id++)
        if (t->tokens[id].flags & TOKEN_VOCAB && t->tokens[id].text.bytes)
            t->sorted[t->sorted_count++] = id;
    qsort_r(t->sorted, t->sorted_count, sizeof *t->sorted, by_bytes, t->tokens);
}

/* A metaspace behind another character. */
static bool spaces_within(text_string text) {
    for (size_t i = 3; i + 3 <= text.bytes; i++)
        if (memcmp(text.at + i, METASPACE, 3) == 0 && memcmp(text.at + i - 3, METASPACE, 3) != 0)
            return true;
    for (size_t i = 1; i < 3 && i + 3 <= text.bytes; i++)
        if (memcmp(text.at + i, METASPACE, 3) == 0) return true;
    return false;
}

void load_split_at_spaces(ml_tokenizer *t) {
    if (text_find(t, &t->by_text, false, METASPACE, 3) == TEXT_NO_ID) return;
    if (t->splits.count == TEXT_MOST_STEPS) return;
    for (uint32_t id = 0; id < t->vocab; id++)
        if (t->tokens[id].flags & TOKEN_VOCAB && spaces_within(t->tokens[id].text)) return;
    void **code = ML_PUSH(t->arena, &t->codes);
    ML_CHECK(regex_compile(METASPACE "+", 4, code));
    text_split *split = ML_PUSH(t->arena, &t->splits);
    *split = (text_split){.kind = SPLIT_PATTERN, .behavior = PIECE_WITH_NEXT};
    split->pattern.code = *code;
}

#include "runtime/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "runtime/base/memory.h"
#include "runtime/text/buffer.h"

struct regex_matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* Oniguruma's \w has the superscripts and fractions of Latin-1 as well. */
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\xb2\\xb3\\xb9\\xbc-\\xbe"

/* \s, \w, \d and their complements by Unicode's properties; PCRE2's own differ in a few. */
static ml_status translate(const char *from, size_t bytes, ml_bytes *to) {
    static const struct {
        char letter;
        const char *outside, *inside;
    } classes[] = {
        {'s', "\\p{White_Space}", "\\p{White_Space}"},
        {'S', "\\P{White_Space}", "\\P{White_Space}"},
        {'d', "\\p{Nd}", "\\p{Nd}"},
        {'D', "\\P{Nd}", "\\P{Nd}"},
        {'w', "[" WORD "]", WORD},
    };
    bool inside = false;
    for (size_t i = 0; i < bytes; i++) {
        const char *text = &from[i];
        size_t count = 1;
        if (from[i] == '\\' && i + 1 < bytes) {
            count = 2, i++;
            for (size_t k = 0; k < sizeof classes / sizeof *classes; k++)
                if (classes[k].letter == from[i]) {
                    text = inside ? classes[k].inside : classes[k].outside;
                    count = __builtin_strlen(text);
                }
        } else if (from[i] == '[') {
            inside = true;
        } else if (from[i] == ']') {
            inside = false;
        }
        ML_TRY(ml_bytes_add(to, text, count));
    }
    return ML_OK;
}

ml_status regex_compile(const char *pattern, size_t bytes, void **code) {
    ml_bytes text = {0};
    int problem;
    PCRE2_SIZE at;
    ml_status status = translate(pattern, bytes, &text);
    *code = status != ML_OK ? NULL
                            : pcre2_compile((PCRE2_SPTR)(text.at ? text.at : ""), text.count,
                                            PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF |
                                                PCRE2_NEVER_BACKSLASH_C,
                                            &problem, &at, NULL);
    ml_bytes_free(&text);
    if (status != ML_OK) return status;
    if (!*code) {
        char reason[256] = "";
        pcre2_get_error_message(problem, (PCRE2_UCHAR *)reason, sizeof reason);
        return ml_fail(ML_INVALID, "the regular expression %.300s: %s", pattern, reason);
    }
    pcre2_jit_compile(*code, PCRE2_JIT_COMPLETE); /* without a JIT it matches too, slowly */
    return ML_OK;
}

void regex_free(void *code) {
    pcre2_code_free(code);
}

regex_matcher *regex_matcher_new(void) {
    regex_matcher *m = ml_alloc(sizeof *m);
    if (!m) return NULL;
    m->data = pcre2_match_data_create(1, NULL);
    m->context = pcre2_match_context_create(NULL);
    m->stack = pcre2_jit_stack_create(1 << 15, 1 << 25, NULL);
    if (m->data && m->context && m->stack) {
        pcre2_jit_stack_assign(m->context, NULL, m->stack);
        return m;
    }
    regex_matcher_free(m);
    return NULL;
}

void regex_matcher_free(regex_matcher *m) {
    if (!m) return;
    pcre2_jit_stack_free(m->stack);
    pcre2_match_context_free(m->context);
    pcre2_match_data_free(m->data);
    ml_free(m);
}

int regex_find(regex_matcher *m, const void *code, const char *text, size_t bytes, size_t from,
               size_t *begin, size_t *end) {
    int found = pcre2_match(code, (PCRE2_SPTR)text, bytes, from, 0, m->data, m->context);
    if (found == PCRE2_ERROR_NOMATCH) return 0;
    if (found < 0) {
        char reason[256] = "";
        pcre2_get_error_message(found, (PCRE2_UCHAR *)reason, sizeof reason);
        ml_fail(ML_INVALID, "the tokenizer's regular expression cannot be matched: %s", reason);
        return -1;
    }
    const PCRE2_SIZE *where = pcre2_get_ovector_pointer(m->data);
    *begin = where[0] < from ? from : where[0];
    *end = where[1] < *begin ? *begin : where[1];
    return 1;
}

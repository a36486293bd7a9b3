/* Regular expressions of tokenizer files, by PCRE2 with its JIT. Their classes (\s, \w, \d) are
 * Unicode's, as in the Rust and Oniguruma engines that the publishers use. */
#ifndef ML_TEXT_REGEX_H
#define ML_TEXT_REGEX_H

#include <stddef.h>

#include "runtime/base/status.h"

/* *code is freed by regex_free. */
ml_status regex_compile(const char *pattern, size_t bytes, void **code);
void regex_free(void *code);

/* What one thread needs to match; NULL when memory is exhausted. */
typedef struct regex_matcher regex_matcher;
regex_matcher *regex_matcher_new(void);
void regex_matcher_free(regex_matcher *matcher);
/* The first match that begins at `from` or later: 1, 0 where there is none, -1: ml_error_last(). */
int regex_find(regex_matcher *matcher, const void *code, const char *text, size_t bytes,
               size_t from, size_t *begin, size_t *end);

#endif

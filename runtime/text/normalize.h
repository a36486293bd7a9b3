/* Normalizers: a text to another, before tokens are looked for. Bytes that are no UTF-8 stay. */
#ifndef ML_TEXT_NORMALIZE_H
#define ML_TEXT_NORMALIZE_H

#include "runtime/text/model.h"
#include "runtime/text/regex.h"

/* Fill what the tokenizer's normalizers read; once, after it is loaded. */
void normalize_prepare(const ml_tokenizer *tokenizer);
/* All of the tokenizer's normalizers; the result is in text[*at], and both are overwritten. */
ml_status normalize_text(const ml_tokenizer *tokenizer, regex_matcher *matcher, const char *from,
                         size_t bytes, ml_bytes text[2], int *at);

#endif

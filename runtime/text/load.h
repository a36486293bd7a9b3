/* Reading tokenizer files: internal to runtime/text. Each raises where a file is not understood or
 * asks for what is not supported; what they allocate is the tokenizer's. */
#ifndef ML_TEXT_LOAD_H
#define ML_TEXT_LOAD_H

#include <jansson.h>

#include "runtime/text/model.h"

/* tokenizer.json, parsed. */
void load_json(ml_tokenizer *tokenizer, const json_t *root);
/* Its normalizer, pre_tokenizer, post_processor and decoder. */
void load_steps(ml_tokenizer *tokenizer, const json_t *root);
/* tokenizer_config.json beside it: which tokens begin and end a document. */
void load_ends(ml_tokenizer *tokenizer, const json_t *config);
/* A .tiktoken file. */
void load_tiktoken(ml_tokenizer *tokenizer, const char *text, size_t bytes);
bool load_is_tiktoken(const char *text, size_t bytes);

/* SentencePiece's .model. */
void load_model(ml_tokenizer *tokenizer, const char *text, size_t bytes);
bool load_is_model(const char *text, size_t bytes);

/* Bytes of base64's digits at *at, which moves behind them, written to `to` unless it is NULL. */
size_t load_base64(const char **at, const char *end, char *to);
/* SentencePiece's precompiled_charsmap. */
void load_charsmap(ml_tokenizer *tokenizer, const char *at, size_t bytes);

#define METASPACE "\xE2\x96\x81"
/* Where no token has a metaspace behind another character, texts are split before metaspaces: no
 * token crosses these borders, and short pieces are quicker than long ones. */
void load_split_at_spaces(ml_tokenizer *tokenizer);

/* Fields of JSON objects; a missing or null one gives the fallback, one of another type raises. */
const char *load_text(const json_t *object, const char *key, const char *fallback);
bool load_flag(const json_t *object, const char *key, bool fallback);
/* The model's tokens by their bytes, for unigram. */
void load_sort_tokens(ml_tokenizer *tokenizer);
/* Sorted, for searching. */
void load_sort_added(text_added_set *set);

#endif

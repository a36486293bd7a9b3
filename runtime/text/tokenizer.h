/* Tokenizers: text to token ids and back.
 *
 * A tokenizer is read once and then never changes: any number of threads may use one. What encoding
 * needs to write (a cache of words, scratch memory) is an encoder's, of which each thread opens its
 * own. Encoding is a function of the tokenizer and the text alone: a cache never changes its
 * result. Ids are what the publisher's library gives: Hugging Face's tokenizers for tokenizer.json,
 * SentencePiece for .model, tiktoken for .tiktoken files; but a text is encoded whole, whatever
 * truncation and padding a tokenizer.json has. Text is UTF-8; bytes that are none are
 * ordinary bytes to a byte-level tokenizer, and U+FFFD to the others, as Python's libraries read
 * files. What a file asks for and is not supported is refused at the opening, by its name. */
#ifndef ML_TOKENIZER_H
#define ML_TOKENIZER_H

#include "runtime/text/buffer.h"

typedef struct ml_tokenizer ml_tokenizer;
typedef struct ml_encoder ml_encoder;

/* `path` names a tokenizer.json, a .tiktoken file, a SentencePiece .model, or a folder that holds
 * one of them; "bytes" is the tokenizer whose 256 tokens are the bytes. */
ml_status ml_tokenizer_open(const char *path, ml_tokenizer **tokenizer);
void ml_tokenizer_close(ml_tokenizer *tokenizer);

const char *ml_tokenizer_name(const ml_tokenizer *tokenizer); /* the path it was opened by */
/* One more than the largest id, added tokens included: what a model's vocab must at least be. */
int64_t ml_tokenizer_vocab(const ml_tokenizer *tokenizer);
/* Of the file's contents: equal tokenizers encode alike. */
uint64_t ml_tokenizer_hash(const ml_tokenizer *tokenizer);

/* The id of a token by its text as the file has it ("<|endoftext|>"), or -1. */
int64_t ml_tokenizer_id(const ml_tokenizer *tokenizer, const char *token);
/* The text of a token, as the file has it, and its length; NULL for an id that is none. */
const char *ml_tokenizer_token(const ml_tokenizer *tokenizer, int64_t id, size_t *bytes);
/* Ids of the tokens that begin and end a document; -1: the tokenizer has none. */
int64_t ml_tokenizer_bos(const ml_tokenizer *tokenizer);
int64_t ml_tokenizer_eos(const ml_tokenizer *tokenizer);

enum {
    /* Add what the tokenizer adds around a text: bos, eos, as its post-processor says. */
    ML_ENCODE_FRAME = 1,
    /* Special tokens that the text spells ("<|endoftext|>") are ordinary text. Otherwise they
     * become their ids, as in Hugging Face's library. */
    ML_ENCODE_PLAIN = 2,
    ML_DECODE_SKIP_SPECIAL = 1, /* leave special tokens out */
};

ml_status ml_encoder_open(const ml_tokenizer *tokenizer, ml_encoder **encoder);
void ml_encoder_close(ml_encoder *encoder);
/* Append the ids of a text. */
ml_status ml_encoder_encode(ml_encoder *encoder, const char *text, size_t bytes, int flags,
                            ml_ids *ids);

/* The same by an encoder of its own, for a text now and then. */
ml_status ml_tokenizer_encode(const ml_tokenizer *tokenizer, const char *text, size_t bytes,
                              int flags, ml_ids *ids);
/* Append the text of ids. An id that is not a token is an error. */
ml_status ml_tokenizer_decode(const ml_tokenizer *tokenizer, const uint32_t *ids, int64_t count,
                              int flags, ml_bytes *text);

/* Token by token, for text that is shown while it is made: each call appends what is certain, whole
 * characters of UTF-8; what is no UTF-8 becomes U+FFFD. The calls together append what Hugging
 * Face's library decodes the ids to. */
typedef struct ml_decoder ml_decoder;
ml_status ml_decoder_open(const ml_tokenizer *tokenizer, int flags, ml_decoder **decoder);
void ml_decoder_close(ml_decoder *decoder);
ml_status ml_decoder_add(ml_decoder *decoder, uint32_t id, ml_bytes *text);
ml_status ml_decoder_end(ml_decoder *decoder, ml_bytes *text); /* what was kept */

#endif

/* Scanners: the pre-tokenizer patterns that published tokenizers use, each a function instead of a
 * regular expression. A scanner and its expression find the same pieces (tests/text/tokenizer.c).
 */
#ifndef ML_TEXT_SCAN_H
#define ML_TEXT_SCAN_H

#include <stddef.h>

typedef enum {
    SCAN_NONE,
    SCAN_GPT2,
    SCAN_LLAMA3,    /* numbers of up to 3 */
    SCAN_CL100K,    /* and one piece of the spaces at the end */
    SCAN_QWEN2,     /* numbers one by one */
    SCAN_NUMBERS_2, /* of up to 2 */
    SCAN_O200K,
    SCAN_DEEPSEEK,
    SCAN_NUMBER_TRIPLES, /* \p{N}{1,3} alone */
    SCAN_CJK,
    SCAN_COUNT
} scan_kind;

/* The scanner of a regular expression, SCAN_NONE where there is none. */
scan_kind scan_of_pattern(const char *pattern);
/* An expression of a scanner: the n-th, NULL after the last. For tests. */
const char *scan_pattern(scan_kind kind, int n);

/* Pieces are the matches and what lies between two matches, in order. Where the next ones end, from
 * *at on, which moves behind them; how many there are: 0 at the end of the text. */
enum { SCAN_MOST = 128 };
int scan_ends(scan_kind kind, const unsigned char **at, const unsigned char *end,
              const unsigned char *ends[SCAN_MOST]);
typedef void scan_piece(void *context, const char *piece, size_t bytes);
/* Call `piece` for each. */
void scan_text(scan_kind kind, const char *text, size_t bytes, scan_piece *piece, void *context);

#endif

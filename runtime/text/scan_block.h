/* Scanners by blocks: most text is ASCII. Internal to runtime/text. */
#ifndef ML_TEXT_SCAN_BLOCK_H
#define ML_TEXT_SCAN_BLOCK_H

#include <stdint.h>

/* The patterns of GPT-2, of the CL100K family with numbers of up to `digits`, of o200k. A piece
 * begins at `at`, of which SCAN_BLOCK bytes can be read. Bit i of the result: a piece begins at
 * at + i; up to the last bit that is set there are no others. 0: these bytes do not decide. */
enum { SCAN_BLOCK = 64 };
uint64_t scan_block_gpt2(const unsigned char *at);
uint64_t scan_block_cl100k(const unsigned char *at, int digits);
uint64_t scan_block_o200k(const unsigned char *at);

#endif

/* SHA-256 (FIPS 180-4) and HMAC (RFC 2104) over it, for handshakes. */
#ifndef COMM_DIGEST_H
#define COMM_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DIGEST_BYTES = 32, DIGEST_BLOCK = 64 };
typedef struct {
    uint32_t state[8];
    uint64_t length; /* bytes so far */
    uint8_t block[DIGEST_BLOCK];
} digest;

void digest_start(digest *d);
void digest_add(digest *d, const void *bytes, size_t size);
void digest_end(digest *d, uint8_t result[DIGEST_BYTES]);

typedef struct {
    digest inner, outer;
} keyed_digest;
void keyed_start(keyed_digest *k, const void *key, size_t size);
void keyed_add(keyed_digest *k, const void *bytes, size_t size);
void keyed_end(keyed_digest *k, uint8_t result[DIGEST_BYTES]);
/* In a time that does not depend on where they differ. */
bool digest_equal(const uint8_t a[DIGEST_BYTES], const uint8_t b[DIGEST_BYTES]);

#endif

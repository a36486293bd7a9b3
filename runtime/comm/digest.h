/* HMAC-SHA-256 (RFC 2104), over libmd's SHA-256: for handshakes, and for what follows them. */
#ifndef COMM_DIGEST_H
#define COMM_DIGEST_H

#include <sha2.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { DIGEST_BYTES = SHA256_DIGEST_LENGTH };

typedef struct {
    SHA2_CTX inner, outer;
} keyed_digest;
void keyed_start(keyed_digest *k, const void *key, size_t size);
void keyed_add(keyed_digest *k, const void *bytes, size_t size);
void keyed_end(keyed_digest *k, uint8_t result[DIGEST_BYTES]);
/* In a time that does not depend on where they differ. */
bool digest_equal(const void *a, const void *b, size_t size);

#endif

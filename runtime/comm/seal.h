/* One direction of a connection between hosts after its handshake. Everything that is sent bears a
 * proof: the first half of HMAC-SHA-256 over its number in this direction and its bytes, under a
 * key of this direction of this connection. So what is changed, sent again, left out, in another
 * order, or sent back to where it comes from is not accepted. */
#ifndef COMM_SEAL_H
#define COMM_SEAL_H

#include "runtime/comm/digest.h"

enum { SEAL_BYTES = 16 };
typedef struct {
    uint8_t key[DIGEST_BYTES];
    uint64_t number; /* of what is next */
} seal;

/* The proof of what is sent next, which is counted. */
void seal_make(seal *s, const void *bytes, size_t size, uint8_t proof[SEAL_BYTES]);
/* Whether these bytes are what the other end sent `ahead` after what was last accepted (0: next);
 * the receiver counts them in `number`. */
bool seal_check(const seal *s, uint64_t ahead, const void *bytes, size_t size,
                const uint8_t proof[SEAL_BYTES]);

#endif

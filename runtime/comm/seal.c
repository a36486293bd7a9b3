#include "runtime/comm/seal.h"

#include <string.h>

static void prove(const seal *s, uint64_t number, const void *bytes, size_t size,
                  uint8_t proof[DIGEST_BYTES]) {
    keyed_digest k;
    keyed_start(&k, s->key, sizeof s->key);
    keyed_add(&k, &number, sizeof number);
    keyed_add(&k, bytes, size);
    keyed_end(&k, proof);
}

void seal_make(seal *s, const void *bytes, size_t size, uint8_t proof[SEAL_BYTES]) {
    uint8_t whole[DIGEST_BYTES];
    prove(s, s->number++, bytes, size, whole);
    memcpy(proof, whole, SEAL_BYTES);
}

bool seal_check(const seal *s, uint64_t ahead, const void *bytes, size_t size,
                const uint8_t proof[SEAL_BYTES]) {
    uint8_t whole[DIGEST_BYTES];
    prove(s, s->number + ahead, bytes, size, whole);
    return digest_equal(whole, proof, SEAL_BYTES);
}

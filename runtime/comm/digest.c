#include "runtime/comm/digest.h"

#include <string.h>

void keyed_start(keyed_digest *k, const void *key, size_t size) {
    uint8_t block[SHA256_BLOCK_LENGTH] = {0}, pad[SHA256_BLOCK_LENGTH];
    if (size > sizeof block) {
        SHA256Init(&k->inner);
        SHA256Update(&k->inner, key, size);
        SHA256Final(block, &k->inner);
    } else if (size) {
        memcpy(block, key, size);
    }
    for (size_t i = 0; i < sizeof pad; i++) pad[i] = block[i] ^ 0x36;
    SHA256Init(&k->inner);
    SHA256Update(&k->inner, pad, sizeof pad);
    for (size_t i = 0; i < sizeof pad; i++) pad[i] = block[i] ^ 0x5c;
    SHA256Init(&k->outer);
    SHA256Update(&k->outer, pad, sizeof pad);
}

void keyed_add(keyed_digest *k, const void *bytes, size_t size) {
    SHA256Update(&k->inner, bytes, size);
}

void keyed_end(keyed_digest *k, uint8_t result[DIGEST_BYTES]) {
    SHA256Final(result, &k->inner);
    SHA256Update(&k->outer, result, DIGEST_BYTES);
    SHA256Final(result, &k->outer);
}

bool digest_equal(const void *a, const void *b, size_t size) {
    const uint8_t *x = a, *y = b;
    unsigned different = 0;
    for (size_t i = 0; i < size; i++) different |= (unsigned)(x[i] ^ y[i]);
    return different == 0;
}

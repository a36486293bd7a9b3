#include "runtime/comm/digest.h"

#include <string.h>

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int bits) {
    return x >> bits | x << (32 - bits);
}

static uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void mix(uint32_t state[8], const uint8_t block[DIGEST_BLOCK]) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) w[i] = big_endian(block + 4 * i);
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] +
               (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
        uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        uint32_t first = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) + choice +
                         ROUNDS[i] + w[i];
        uint32_t second = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) + majority;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + second;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

void digest_start(digest *d) {
    /* of the square roots of the first 8 primes */
    static const uint32_t first[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(d->state, first, sizeof first);
    d->length = 0;
}

void digest_add(digest *d, const void *bytes, size_t size) {
    const uint8_t *at = bytes;
    while (size) {
        size_t used = d->length % DIGEST_BLOCK;
        size_t part = DIGEST_BLOCK - used < size ? DIGEST_BLOCK - used : size;
        memcpy(d->block + used, at, part);
        d->length += part;
        at += part;
        size -= part;
        if (d->length % DIGEST_BLOCK == 0) mix(d->state, d->block);
    }
}

void digest_end(digest *d, uint8_t result[DIGEST_BYTES]) {
    uint8_t bits[8], one = 0x80, zero = 0;
    for (int i = 0; i < 8; i++) bits[i] = (uint8_t)(d->length * 8 >> (56 - 8 * i));
    digest_add(d, &one, 1);
    while (d->length % DIGEST_BLOCK != DIGEST_BLOCK - 8) digest_add(d, &zero, 1);
    digest_add(d, bits, 8);
    for (int i = 0; i < DIGEST_BYTES; i++)
        result[i] = (uint8_t)(d->state[i / 4] >> (24 - 8 * (i % 4)));
}

void keyed_start(keyed_digest *k, const void *key, size_t size) {
    uint8_t block[DIGEST_BLOCK] = {0}, pad[DIGEST_BLOCK];
    if (size > DIGEST_BLOCK) {
        digest_start(&k->inner);
        digest_add(&k->inner, key, size);
        digest_end(&k->inner, block);
    } else if (size) {
        memcpy(block, key, size);
    }
    for (int i = 0; i < DIGEST_BLOCK; i++) pad[i] = block[i] ^ 0x36;
    digest_start(&k->inner);
    digest_add(&k->inner, pad, sizeof pad);
    for (int i = 0; i < DIGEST_BLOCK; i++) pad[i] = block[i] ^ 0x5c;
    digest_start(&k->outer);
    digest_add(&k->outer, pad, sizeof pad);
}

void keyed_add(keyed_digest *k, const void *bytes, size_t size) {
    digest_add(&k->inner, bytes, size);
}

void keyed_end(keyed_digest *k, uint8_t result[DIGEST_BYTES]) {
    digest_end(&k->inner, result);
    digest_add(&k->outer, result, DIGEST_BYTES);
    digest_end(&k->outer, result);
}

bool digest_equal(const uint8_t a[DIGEST_BYTES], const uint8_t b[DIGEST_BYTES]) {
    unsigned different = 0;
    for (int i = 0; i < DIGEST_BYTES; i++) different |= (unsigned)(a[i] ^ b[i]);
    return different == 0;
}

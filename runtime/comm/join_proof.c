/* Who a rank is, and what ranks prove to one another that they know. */
#include "runtime/comm/join_internal.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

const char JOIN_MAGIC[8] = "mlua.j2\n";
const char *join_boot;

void join_random(void *bytes, size_t size) {
    uint8_t *at = bytes;
    while (size) {
        ssize_t count = getrandom(at, size, 0);
        if (count > 0) {
            at += count;
            size -= (size_t)count;
        }
    }
}

void join_random_hex(char *text, size_t digits) {
    join_random(text, digits);
    for (size_t i = 0; i < digits; i++) text[i] = "0123456789abcdef"[text[i] & 15];
    text[digits] = 0;
}

static void copy_line(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "re");
    if (file && fgets(text, (int)size, file)) text[strcspn(text, "\n")] = 0;
    if (file) fclose(file);
}

void join_who_fill(const ml_launch *launch, join_who *who) {
    const int hosts = launch->options.hosts;
    memset(who, 0, sizeof *who);
    if (join_boot)
        snprintf(who->boot, sizeof who->boot, "%s", join_boot);
    else
        copy_line("/proc/sys/kernel/random/boot_id", who->boot, sizeof who->boot);
    gethostname(who->host, sizeof who->host - 1);
    if (hosts > 1 &&
        launch->world > 1) { /* ranks in a row are on one host, as launchers put them */
        int host = (int)((int64_t)launch->rank * hosts / launch->world);
        size_t length = strnlen(who->boot, 24);
        snprintf(who->boot + length, sizeof who->boot - length, " host %d", host);
    }
    who->pid = (uint32_t)getpid();
}

uint64_t join_host(const ml_launch *launch) {
    join_who who;
    join_who_fill(launch, &who);
    const char *name = *who.boot ? who.boot : who.host;
    return ml_hash(name, strlen(name), 0);
}

static void prove(const join_job *job, const char *side, const join_hello *hello,
                  const uint8_t nonce[DIGEST_BYTES], const void *more, size_t size,
                  uint8_t proof[DIGEST_BYTES]) {
    keyed_digest k;
    keyed_start(&k, job->key, sizeof job->key);
    keyed_add(&k, side, strlen(side) + 1);
    keyed_add(&k, hello, sizeof *hello);
    keyed_add(&k, nonce, DIGEST_BYTES);
    keyed_add(&k, more, size);
    keyed_end(&k, proof);
}

void join_prove_server(const join_job *job, const join_hello *hello,
                       const uint8_t nonce[DIGEST_BYTES], uint8_t proof[DIGEST_BYTES]) {
    prove(job, "server", hello, nonce, NULL, 0, proof);
}

void join_prove_client(const join_job *job, const join_hello *hello,
                       const uint8_t nonce[DIGEST_BYTES], const join_who *who,
                       uint8_t proof[DIGEST_BYTES]) {
    prove(job, "client", hello, nonce, who, sizeof *who, proof);
}

void join_prove_welcome(const join_job *job, const join_hello *hello,
                        const uint8_t nonce[DIGEST_BYTES], const join_welcome *welcome,
                        uint8_t proof[DIGEST_BYTES]) {
    prove(job, "welcome", hello, nonce, welcome, offsetof(join_welcome, proof), proof);
}

void join_key(const join_job *job, const char *direction, const join_hello *hello,
              const uint8_t nonce[DIGEST_BYTES], uint8_t key[DIGEST_BYTES]) {
    prove(job, direction, hello, nonce, NULL, 0, key);
}

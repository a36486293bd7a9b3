/* Where ranks that no launcher of ours started find one another. */
#include "runtime/base/clock.h"
#include "runtime/comm/join_internal.h"

#include <stdlib.h>
#include <string.h>

/* For all ranks of a job to come: big jobs start slowly. */
static const double JOIN_SECONDS = 180;

/* host:port, or [host]:port */
static bool split_address(const char *address, join_job *job) {
    const char *colon = strrchr(address, ':');
    if (!colon || colon == address) return false;
    size_t length = (size_t)(colon - address);
    bool brackets = address[0] == '[' && colon[-1] == ']';
    if (brackets) address++, length -= 2;
    if (length == 0 || length >= sizeof job->host) return false;
    memcpy(job->host, address, length);
    job->host[length] = 0;
    char *end;
    long port = strtol(colon + 1, &end, 10);
    job->port = (int)port;
    job->ports = job->launch->fixed_port ? 1 : JOIN_PORTS;
    return !*end && port > 0 && port + job->ports <= 65536;
}

static void make_key(join_job *job, const char *secret) {
    keyed_digest k;
    keyed_start(&k, secret, strlen(secret));
    keyed_add(&k, job->launch->job, strlen(job->launch->job) + 1);
    keyed_end(&k, job->key);
}

ml_status comm_join(ml_comm *comm, const ml_launch *launch) {
    char secret[65 + 256];
    const int timeout = launch->options.timeout;
    join_job job = {.launch = launch};
    job.deadline = ml_clock_now() + (timeout > 0 ? timeout : JOIN_SECONDS);
    if (!split_address(launch->address, &job)) {
        ml_fail(ML_INVALID, "%s does not say where rank 0 is%s%s", launch->source,
                *launch->address ? ": " : "", launch->address);
        return ml_help("set MASTER_ADDR to the name of rank 0's host, and MASTER_PORT");
    }
    ML_TRY(comm_secret(launch, secret));
    make_key(&job, secret);
    return launch->rank == 0 ? join_serve(comm, &job) : join_enter(comm, &job);
}

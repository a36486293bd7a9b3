/* Opening and closing of communicators, groups, and what all ranks must agree on. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/pool.h"
#include "runtime/comm/wire_internal.h"

/* Spinning pays only while every rank has a core of its own. */
enum { SPINS = 16384, SPINS_CROWDED = 64 };
static const double PART_SECONDS = 5;

/* ---- Groups ---------------------------------------------------------------------------------- */

static ml_group *group_new(ml_comm *comm, const int *ranks, int count) {
    size_t head = sizeof(ml_group) + (size_t)count * sizeof(int);
    head = (head + 15) / 16 * 16;
    ml_group *g = ml_alloc(head + (size_t)count * sizeof(void *));
    if (!g) return NULL;
    g->comm = comm;
    g->index = comm->group_count;
    g->size = count;
    g->spins = comm->spins;
    g->sources = (const void **)((char *)g + head);
    for (int i = 0; i < count; i++) {
        g->ranks[i] = ranks[i];
        if (ranks[i] == comm->rank) g->rank = i;
    }
    comm->groups[comm->group_count++] = g;
    return g;
}

static bool same_ranks(const ml_group *g, const int *ranks, int count) {
    return g->size == count && memcmp(g->ranks, ranks, (size_t)count * sizeof(int)) == 0;
}

/* Rank lists must name this rank once, and every rank at most once. */
static ml_status check_ranks(const ml_comm *comm, const int *ranks, int count) {
    bool here = false;
    for (int i = 0; i < count; i++) {
        if (ranks[i] < 0 || ranks[i] >= comm->world)
            return ml_fail(ML_INTERNAL, "a group with rank %d of %d", ranks[i], comm->world);
        for (int k = 0; k < i; k++)
            if (ranks[k] == ranks[i])
                return ml_fail(ML_INTERNAL, "a group with rank %d twice", ranks[i]);
        here = here || ranks[i] == comm->rank;
    }
    return here ? ML_OK : ml_fail(ML_INTERNAL, "a group without this rank, %d", comm->rank);
}

/* The earlier indices at which all ranks created the group that each of them requests; in *common.
 */
static ml_status common_indices(ml_comm *comm, uint64_t mine, uint64_t *common) {
    uint64_t *words = ml_alloc((size_t)comm->world * sizeof *words);
    if (!words) return ml_fail(ML_NO_MEMORY, "no memory for a group of ranks");
    ml_status status = comm_words(comm->groups[0], mine, words);
    *common = mine;
    for (int i = 0; status == ML_OK && i < comm->world; i++) *common &= words[i];
    ml_free(words);
    return status;
}

/* All members must have passed the same list. */
static ml_status check_members(ml_comm *comm, ml_group *g) {
    uint64_t hash = ml_hash(g->ranks, (size_t)g->size * sizeof(int), 0);
    uint64_t *words = ml_alloc((size_t)comm->world * sizeof *words);
    if (!words) return ml_fail(ML_NO_MEMORY, "no memory for a group of ranks");
    ml_status status = comm_words(comm->groups[0], hash, words);
    for (int i = 0; status == ML_OK && i < g->size; i++)
        if (words[g->ranks[i]] != hash)
            status = ml_fail(ML_INVALID, "ranks %d and %d disagree on the group that they are in",
                             comm->rank, g->ranks[i]);
    ml_free(words);
    return status;
}

ml_status ml_comm_group(ml_comm *comm, const int *ranks, int count, ml_group **group) {
    *group = NULL;
    ml_status status = check_ranks(comm, ranks, count);
    if (status != ML_OK) return status;
    uint64_t mine = 0, common = 0;
    for (int i = 0; i < comm->group_count; i++)
        if (same_ranks(comm->groups[i], ranks, count)) mine |= 1ull << i;
    if (comm->world == 1)
        common = mine;
    else if (!comm->wire && (status = common_indices(comm, mine, &common)) != ML_OK)
        return status;
    if (common) {
        *group = comm->groups[__builtin_ctzll(common)];
        return ML_OK;
    }
    if (comm->group_count == COMM_MOST_GROUPS)
        return ml_fail(ML_INVALID, "more than %d groups of ranks", COMM_MOST_GROUPS - 1);
    ml_group *g = group_new(comm, ranks, count);
    if (!g) return ml_fail(ML_NO_MEMORY, "no memory for a group of ranks");
    if (comm->world > 1 && !comm->wire && (status = check_members(comm, g)) != ML_OK) return status;
    *group = g;
    return ML_OK;
}

ml_group *ml_comm_everyone(ml_comm *comm) {
    return comm->groups[0];
}

int ml_group_size(const ml_group *group) {
    return group->size;
}

int ml_group_rank(const ml_group *group) {
    return group->rank;
}

int ml_comm_rank(const ml_comm *comm) {
    return comm->rank;
}

int ml_comm_local_rank(const ml_comm *comm) {
    return comm->local_rank;
}

int ml_comm_world(const ml_comm *comm) {
    return comm->world;
}

bool ml_comm_local(const ml_comm *comm) {
    return comm->wire == NULL;
}

int ml_comm_host_ranks(const ml_comm *comm) {
    return comm->host_ranks;
}

uint64_t ml_comm_host(const ml_comm *comm) {
    return comm->host;
}

/* ---- Agreement ------------------------------------------------------------------------------- */

/* One word of each rank, between hosts too. */
static ml_status gather_words(ml_comm *comm, uint64_t mine, uint64_t *words) {
    return comm->wire ? wire_words(comm, mine, words) : comm_words(comm->groups[0], mine, words);
}

static ml_status wire_barrier(ml_comm *comm) {
    uint64_t *words = ml_alloc((size_t)comm->world * sizeof *words);
    if (!words) return ml_fail(ML_NO_MEMORY, "no memory to wait for %d ranks", comm->world);
    ml_status status = wire_words(comm, 0, words);
    ml_free(words);
    return status;
}

ml_status ml_comm_barrier(ml_comm *comm) {
    if (comm->world == 1) return ML_OK;
    if (comm->wire) return wire_barrier(comm);
    ml_group *g = comm->groups[0];
    ml_status status = comm_begin(g, comm_describe(COMM_BARRIER, 0, 0, 0));
    return status == ML_OK ? comm_first_meet(g) : status;
}

/* The value that most ranks have is taken as right, the lowest rank's among equals. */
static ml_status name_different(const uint64_t *values, int world, const char *what) {
    int best = 0, best_votes = 0, different = 0, count = 0;
    for (int i = 0; i < world && i < 64; i++) {
        int votes = 0;
        for (int k = 0; k < world; k++) votes += values[k] == values[i];
        if (votes > best_votes) best = i, best_votes = votes;
    }
    for (int i = world - 1; i >= 0; i--)
        if (values[i] != values[best]) different = i, count++;
    if (count == 0) return ML_OK;
    ml_fail(ML_INVALID, "%s of rank %d differs from rank %d's (%d of %d ranks differ)", what,
            different, best, count, world);
    return ml_help("every rank must run the same script with the same settings and files");
}

ml_status ml_comm_agree(ml_comm *comm, uint64_t value, const char *what) {
    if (comm->world == 1) return ML_OK;
    uint64_t *values = ml_alloc((size_t)comm->world * sizeof *values);
    if (!values) return ml_fail(ML_NO_MEMORY, "no memory to compare %s between ranks", what);
    ml_status status = gather_words(comm, value, values);
    if (status == ML_OK) status = name_different(values, comm->world, what);
    ml_free(values);
    return status;
}

ml_status ml_comm_least(ml_comm *comm, int64_t *value) {
    if (comm->world == 1) return ML_OK;
    uint64_t *values = ml_alloc((size_t)comm->world * sizeof *values);
    if (!values) return ml_fail(ML_NO_MEMORY, "no memory to compare numbers between ranks");
    ml_status status = gather_words(comm, (uint64_t)*value, values);
    for (int i = 0; i < comm->world && status == ML_OK; i++)
        if ((int64_t)values[i] < *value) *value = (int64_t)values[i];
    ml_free(values);
    return status;
}

ml_status ml_comm_share(ml_comm *comm, void *bytes, size_t size) {
    if (comm->world == 1) return ML_OK;
    if (comm->wire) return wire_share(comm, bytes, size);
    ml_group *g = comm->groups[0];
    ml_status status = comm_begin(g, comm_describe(COMM_SHARE, 0, 0, (int64_t)size));
    for (size_t at = 0, chunk = comm->segment->chunk_bytes; status == ML_OK && at < size;
         at += chunk) {
        size_t part = size - at < chunk ? size - at : chunk;
        char *buffer = comm_buffer(comm->segment, comm_slot_of(comm->segment, 0, 0), g->step);
        if (comm->rank == 0) memcpy(buffer, (char *)bytes + at, part);
        status = at == 0 ? comm_first_meet(g) : comm_meet(g);
        if (status == ML_OK && comm->rank != 0) memcpy((char *)bytes + at, buffer, part);
    }
    return status;
}

ml_status ml_comm_swap(ml_comm *comm, int other, const void *mine, void *theirs, int words) {
    size_t bytes = (size_t)words * sizeof(int64_t);
    if (comm->wire) return wire_swap(comm, other, mine, theirs, bytes);
    char *all = ml_alloc((size_t)comm->world * bytes);
    if (!all) return ml_fail(ML_NO_MEMORY, "no memory for messages of pairs of ranks");
    ml_status status = ML_OK;
    if (comm->world == 1)
        memcpy(all, mine, bytes);
    else
        status = ml_comm_collect(comm->groups[0], ML_COLLECTIVE_ALL_GATHER, mine, all, words,
                                 ML_I64, ML_COMBINE_SUM);
    if (status == ML_OK && other >= 0) memcpy(theirs, all + (size_t)other * bytes, bytes);
    if (other < 0) memset(theirs, 0, bytes);
    ml_free(all);
    return status;
}

/* ---- Parting --------------------------------------------------------------------------------- */

static bool still_here(const ml_comm *comm, uint32_t times) {
    for (int i = 0; i < comm->world; i++) {
        comm_record *record = &comm->segment->ranks[i];
        if (atomic_load(&record->state) <= COMM_RUNNING && atomic_load(&record->parted) < times)
            return true;
    }
    return false;
}

void ml_comm_part(ml_comm *comm) {
    if (!comm || comm->world == 1 || !comm->segment) return;
    double deadline = ml_clock_now() + PART_SECONDS;
    uint32_t times = atomic_fetch_add(&comm->segment->ranks[comm->rank].parted, 1) + 1;
    if (atomic_load(&comm->segment->failed)) return;
    if (comm->wire) {
        wire_part(comm, times, deadline);
        return;
    }
    while (still_here(comm, times) && ml_clock_now() < deadline &&
           !atomic_load(&comm->segment->failed))
        usleep(1000);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static ml_status join(ml_comm *comm, const ml_launch *launch) {
    ml_status status = ML_OK;
    if (strncmp(launch->address, "fd:", 3) == 0)
        comm->fd = (int)strtol(launch->address + 3, NULL, 10);
    else
        ML_TRY(comm_join(comm, launch));
    if (comm->wire) {
        comm->segment = comm_segment_alone(comm->world, &comm->mapped);
        return comm->segment ? ML_OK : ml_fail(ML_NO_MEMORY, "no memory to join the other ranks");
    }
    if ((status = comm_segment_map(comm->fd, &comm->segment, &comm->mapped)) != ML_OK)
        return status;
    if (comm->segment->world != comm->world)
        return ml_fail(ML_INVALID, "the shared memory is of %d ranks, not %d", comm->segment->world,
                       comm->world);
    return ML_OK;
}

/* How many are on this host, where they are on several. */
static ml_status count_host(ml_comm *comm) {
    uint64_t *hosts = ml_alloc((size_t)comm->world * sizeof *hosts);
    if (!hosts) return ml_fail(ML_NO_MEMORY, "no memory to join %d ranks", comm->world);
    ml_status status = wire_words(comm, comm->host, hosts);
    comm->host_ranks = 0;
    for (int i = 0; i < comm->world && status == ML_OK; i++)
        comm->host_ranks += hosts[i] == comm->host;
    ml_free(hosts);
    return status;
}

static ml_status open_ranks(ml_comm *comm, const ml_launch *launch) {
    ml_status status = join(comm, launch);
    if (status != ML_OK || (status = comm_watch_start(comm)) != ML_OK) return status;
    comm_record *record = &comm->segment->ranks[comm->rank];
    atomic_store(&record->pid, (int32_t)getpid());
    atomic_store(&record->state, COMM_RUNNING);
    if (comm->wire && (status = count_host(comm)) != ML_OK) return status;
    return ml_comm_barrier(comm);
}

ml_status ml_comm_open(const ml_launch *launch, ml_comm **result) {
    *result = NULL;
    int world = launch->world;
    if (launch->wrong[0])
        return ml_fail(ML_INVALID, "%s is not a number (from %s)", launch->wrong, launch->source);
    if (world < 1 || launch->rank < 0 || launch->rank >= world)
        return ml_fail(ML_INVALID, "rank %d of %d ranks (from %s)", launch->rank, world,
                       launch->source);
    ml_comm *comm = ml_alloc(sizeof *comm);
    int *ranks = ml_alloc((size_t)world * sizeof *ranks);
    ml_group *all = NULL;
    if (comm && ranks) {
        comm->rank = launch->rank;
        comm->world = world;
        comm->local_rank = launch->local_rank;
        comm->timeout = launch->options.timeout;
        comm->threads = launch->threads;
        comm->fd = -1;
        comm->host = join_host(launch);
        comm->host_ranks = world;
        comm->spins = ml_cpu_count() >= world ? SPINS : SPINS_CROWDED;
        for (int i = 0; i < world; i++) ranks[i] = i;
        all = group_new(comm, ranks, world);
    }
    ml_free(ranks);
    if (!all) {
        ml_free(comm);
        return ml_fail(ML_NO_MEMORY, "no memory to join %d ranks", world);
    }
    ml_status status = world > 1 ? open_ranks(comm, launch) : ML_OK;
    if (status != ML_OK) {
        ml_error error = *ml_error_last();
        ml_comm_close(comm);
        *ml_error_last() = error;
        return status;
    }
    *result = comm;
    return ML_OK;
}

void ml_comm_close(ml_comm *comm) {
    if (!comm) return;
    if (comm->watched) atomic_store(&comm->segment->ranks[comm->rank].state, COMM_DONE);
    comm_watch_stop(comm);
    wire_free(comm);
    comm_channels_free(comm);
    if (comm->segment) munmap(comm->segment, comm->mapped);
    if (comm->fd >= 0) close(comm->fd);
    for (int i = 0; i < comm->group_count; i++) ml_free(comm->groups[i]);
    ml_free(comm);
}

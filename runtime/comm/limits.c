/* How long a rank may be silent, late or busy before the others give it up. Seconds. */
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/comm/comm_internal.h"

static const double STOPPED = 12;    /* without a beat: stopped */
static const double STARTS = 25;     /* to join the others, once all are known to be started */
static const double LATE = 24;       /* a living rank may be waited for so long */
static const double STEPS = 3;       /* or so many steps, where these take longer */
static const double LATE_BUSY = 600; /* ml_comm_busy: compilers run */

double comm_stale_limit(int timeout) {
    return timeout > 0 && timeout < STOPPED ? timeout : STOPPED;
}

double comm_start_limit(int timeout) {
    return timeout > 0 ? timeout : STARTS;
}

static double median_step(const ml_comm *comm) {
    double times[COMM_STEP_TIMES];
    int count = comm->steps - 1 < COMM_STEP_TIMES ? comm->steps - 1 : COMM_STEP_TIMES;
    memcpy(times, comm->step_times, (size_t)count * sizeof *times);
    return ml_clock_median(times, count);
}

double comm_late_limit(const ml_comm *comm, bool busy) {
    if (busy) return LATE_BUSY;
    if (comm->timeout > 0) return comm->timeout;
    double limit = comm->steps < 2 ? comm->expected : STEPS * median_step(comm);
    return limit > LATE ? limit : LATE;
}

double comm_late_waiting(double limit) {
    return 1.05 * limit + 1;
}

void ml_comm_expect(ml_comm *comm, double seconds) {
    if (seconds > comm->expected) comm->expected = seconds;
}

void ml_comm_step(ml_comm *comm) {
    double now = ml_clock_now();
    if (comm->steps > 0)
        comm->step_times[(comm->steps - 1) % COMM_STEP_TIMES] = now - comm->step_began;
    comm->step_began = now;
    if (comm->steps < 1000000000) comm->steps++;
}

#include "runtime/base/divisor.h"

int64_t ml_divisor_from(int64_t n, int64_t least, int64_t most) {
    for (int64_t d = least; d <= most && d <= n; d++)
        if (n % d == 0) return d;
    return 0;
}

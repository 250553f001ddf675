// DPDK's environment abstraction layer: start and log.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_log.h>

#include "handlers.h"
#include "pool.h"

// End of DPDK's log, kept for error messages.
static pthread_mutex_t said_lock = PTHREAD_MUTEX_INITIALIZER;
static char said[1024];
static size_t said_bytes;

static ssize_t keep(void *cookie, const char *text, size_t bytes)
{
    (void)cookie;
    size_t all = bytes;
    if (bytes > sizeof(said)) {
        text += bytes - sizeof(said);
        bytes = sizeof(said);
    }
    pthread_mutex_lock(&said_lock);
    if (said_bytes + bytes > sizeof(said)) {
        size_t too_many = said_bytes + bytes - sizeof(said);
        memmove(said, said + too_many, said_bytes - too_many);
        said_bytes -= too_many;
    }
    memcpy(said + said_bytes, text, bytes);
    said_bytes += bytes;
    pthread_mutex_unlock(&said_lock);
    return (ssize_t)all;
}

// Captures DPDK's log from now on instead of printing it.
void dpdk_keep_log(void)
{
    cookie_io_functions_t functions = { .write = keep };
    FILE *stream = fopencookie(NULL, "w", functions);
    if (stream != NULL) {
        setvbuf(stream, NULL, _IONBF, 0);
        rte_openlog_stream(stream);
    }
}

// Copies and clears the captured log; at most its last `room` bytes. Returns their number.
size_t dpdk_take_log(char *to, size_t room)
{
    pthread_mutex_lock(&said_lock);
    size_t bytes = said_bytes < room ? said_bytes : room;
    memcpy(to, said + said_bytes - bytes, bytes);
    said_bytes = 0;
    pthread_mutex_unlock(&said_lock);
    return bytes;
}

// Starts DPDK. Returns 0 or an error number. DPDK keeps `argv`.
int dpdk_start(int argc, char **argv)
{
    if (rte_eal_init(argc, argv) < 0)
        return rte_errno;
    int error = dpdk_pools_start();
    return error != 0 ? error : dpdk_handlers_start();
}

// Clients of an NFS server by libnfs: the load of `tidegate-lab nfs`, which builds this program.
//
// libnfs URL COUNTERS CONNECTIONS OUTSTANDING RATE
//
// Reads 8 KiB at random places of the file that URL names, and asks for its attributes once in
// ATTRIBUTES_EVERY calls. Each connection has up to OUTSTANDING calls under way. RATE is the number
// of calls a second, of all connections together, as far as answers come; 0 is as many as
// possible. COUNTERS is a file of four numbers of 64 bits: calls answered, calls failed, calls that
// were due when all were under way, 0. Prints a line when all connections are mounted.
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <nfsc/libnfs.h>

#define READ_BYTES 8192
#define ATTRIBUTES_EVERY 8
#define MAX_CONNECTIONS 64
// Calls that may be due at once after a delay, for each connection.
#define MAX_LATE 64

struct connection {
    struct nfs_context *nfs;
    struct nfsfh *file;
    int outstanding;
};

static struct connection connections[MAX_CONNECTIONS];
static volatile uint64_t *counters;
static uint64_t blocks;
static uint64_t state = 0x9e3779b97f4a7c15;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void fail(struct nfs_context *nfs, const char *what) {
    fprintf(stderr, "%s: %s\n", what, nfs ? nfs_get_error(nfs) : "");
    exit(1);
}

static void on_reply(int status, struct nfs_context *nfs, void *data, void *of) {
    (void)nfs, (void)data;
    struct connection *connection = of;
    connection->outstanding--;
    counters[status < 0 ? 1 : 0]++;
}

static void on_read(int status, struct nfs_context *nfs, void *data, void *of) {
    // The file is a multiple of the size of a read.
    on_reply(status == READ_BYTES ? 0 : -1, nfs, data, of);
}

static void call(struct connection *connection) {
    int is_read = next_random() % ATTRIBUTES_EVERY != 0;
    uint64_t offset = next_random() % blocks * READ_BYTES;
    int queued = is_read ? nfs_pread_async(connection->nfs, connection->file, offset, READ_BYTES,
                                           on_read, connection)
                         : nfs_fstat64_async(connection->nfs, connection->file, on_reply,
                                             connection);
    if (queued != 0)
        fail(connection->nfs, "call");
    connection->outstanding++;
}

static void open_connection(struct connection *connection, const char *text) {
    struct nfs_context *nfs = connection->nfs = nfs_init_context();
    if (!nfs)
        fail(NULL, "nfs_init_context");
    struct nfs_url *url = nfs_parse_url_full(nfs, text);
    if (!url)
        fail(nfs, "url");
    if (nfs_mount(nfs, url->server, url->path) != 0)
        fail(nfs, "mount");
    if (nfs_open(nfs, url->file, O_RDONLY, &connection->file) != 0)
        fail(nfs, "open");
    struct nfs_stat_64 stat;
    if (nfs_fstat64(nfs, connection->file, &stat) != 0)
        fail(nfs, "fstat");
    blocks = stat.nfs_size / READ_BYTES;
    if (blocks == 0)
        fail(NULL, "the file is too small");
    nfs_destroy_url(url);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: %s URL COUNTERS CONNECTIONS OUTSTANDING RATE\n", argv[0]);
        return 2;
    }
    int count = atoi(argv[3]), max_outstanding = atoi(argv[4]);
    double rate = atof(argv[5]);
    if (count < 1 || count > MAX_CONNECTIONS || max_outstanding < 1)
        return 2;
    int file = open(argv[2], O_RDWR | O_CREAT, 0644);
    if (file < 0 || ftruncate(file, 4 * sizeof *counters) != 0)
        fail(NULL, "counters");
    counters = mmap(NULL, 4 * sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (counters == MAP_FAILED)
        fail(NULL, "counters");
    struct pollfd polled[MAX_CONNECTIONS];
    for (int i = 0; i < count; i++)
        open_connection(&connections[i], argv[1]);
    puts("ready");
    fflush(stdout);

    double interval = rate > 0 ? 1 / rate : 0, due = seconds_now();
    for (int turn = 0;;) {
        double now = seconds_now();
        // Calls that cannot be made now are not made up for later.
        if (rate > 0 && now - due > MAX_LATE * count * interval) {
            counters[2] += (uint64_t)((now - due) / interval) - MAX_LATE * count;
            due = now - MAX_LATE * count * interval;
        }
        for (int full = 0; full < count && (rate == 0 || due <= now);) {
            struct connection *connection = &connections[turn++ % count];
            if (connection->outstanding < max_outstanding) {
                call(connection);
                due += interval;
                full = 0;
            } else {
                full++;
            }
        }
        for (int i = 0; i < count; i++) {
            polled[i].fd = nfs_get_fd(connections[i].nfs);
            polled[i].events = nfs_which_events(connections[i].nfs);
            polled[i].revents = 0;
        }
        double wait = rate > 0 ? due - now : 0.1;
        struct timespec timeout = {0, wait > 0 && wait < 0.1 ? (long)(wait * 1e9) : 100000000};
        if (rate > 0 && wait <= 0)
            timeout.tv_nsec = 1000000;
        if (ppoll(polled, count, &timeout, NULL) < 0)
            continue;
        for (int i = 0; i < count; i++)
            if (polled[i].revents && nfs_service(connections[i].nfs, polled[i].revents) < 0)
                fail(connections[i].nfs, "connection");
    }
}

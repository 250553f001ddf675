/* Echoes the data of a connection while a signal handler writes to the same connection and
 * sends datagrams, every 100 us. Allocates memory in between. At the end of the connection,
 * reports how often the handler has written. */

#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static volatile int connection = -1, datagrams = -1;
static volatile long written;
static struct sockaddr_in6 peer;

static void on_alarm(int signal) {
    int error = errno;
    (void)signal;
    if (send(connection, "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1) written++;
    sendto(datagrams, "tick", 4, MSG_DONTWAIT, (struct sockaddr *)&peer, sizeof peer);
    errno = error;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void tick(int us) {
    struct itimerval every = {{0, us}, {0, us}};
    if (setitimer(ITIMER_REAL, &every, NULL) != 0) fail("setitimer");
}

static void write_all(const char *data, size_t len) {
    while (len > 0) {
        ssize_t now = write(connection, data, len);
        if (now < 0 && (errno == EPIPE || errno == ECONNRESET)) return;
        if (now < 0 && errno != EINTR) fail("write");
        if (now > 0) data += now, len -= now;
    }
}

int main(int count, char **arguments) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;
    action.sa_flags = count > 1 && strcmp(arguments[1], "restart") == 0 ? SA_RESTART : 0;
    if (sigaction(SIGALRM, &action, NULL) != 0) fail("sigaction");

    signal(SIGPIPE, SIG_IGN);

    struct sockaddr_in6 any;
    memset(&any, 0, sizeof any);
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(7500);
    int both = 0, again = 1, listener = socket(AF_INET6, SOCK_STREAM, 0);
    setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &again, sizeof again);
    datagrams = socket(AF_INET6, SOCK_DGRAM, 0);
    setsockopt(datagrams, IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) != 0) fail("bind");
    if (bind(datagrams, (struct sockaddr *)&any, sizeof any) != 0) fail("bind");
    if (listen(listener, 8) != 0) fail("listen");

    for (;;) {
        socklen_t len = sizeof peer;
        connection = accept(listener, (struct sockaddr *)&peer, &len);
        if (connection < 0 && errno == EINTR) continue;
        if (connection < 0) fail("accept");
        written = 0;
        tick(100);
        char data[1000];
        for (;;) {
            ssize_t got = read(connection, data, sizeof data);
            if (got < 0 && errno == EINTR) continue;
            if (got == 0 || (got < 0 && errno == ECONNRESET)) break;
            if (got < 0) fail("read");
            char *copy = malloc(got * 100);
            memcpy(copy, data, got);
            write_all(copy, got);
            free(copy);
        }
        tick(0);
        char report[40];
        snprintf(report, sizeof report, "\n%ld\n", written);
        write_all(report, strlen(report));
        close(connection);
    }
}

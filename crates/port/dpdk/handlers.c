#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

#include <rte_alarm.h>
#include <rte_ethdev.h>

#include "handlers.h"

// How long handlers wait for their turn, in microseconds: while links are up,
// while one is down, and while one has just been started. A memif needs about
// ten turns to connect, and each keeps the data path waiting for some
// microseconds.
#define REST_US 10000
#define SHORT_REST_US 4000
#define SHORTEST_REST_US 50

// So many of the shortest rests follow when something was done to a device.
#define SHORTEST_RESTS 2000

struct task {
    void (*work)(void *argument);
    void *argument;
    sem_t is_done;
};

// Of the thread of the handlers alone.
static uint8_t is_watched[RTE_MAX_ETHPORTS];
static unsigned shortest_rests;
static int takes_turns;

static void on_done(void *argument)
{
    struct task *task = argument;
    sem_post(&task->is_done);
}

static void on_alarm(void *argument)
{
    struct task *task = argument;
    task->work(task->argument);
    shortest_rests = SHORTEST_RESTS;
    // The thread still has events that have come together with this one. Were a
    // descriptor of theirs closed and opened anew by who waits, a handler would
    // wait for a message that does not come.
    if (rte_eal_alarm_set(1, on_done, task) != 0)
        on_done(task);
}

void tg_among_handlers(void (*work)(void *argument), void *argument)
{
    struct task task = { .work = work, .argument = argument };
    sem_init(&task.is_done, 0, 0);
    if (rte_eal_alarm_set(1, on_alarm, &task) != 0)
        on_alarm(&task);
    while (sem_wait(&task.is_done) != 0)
        ;
    sem_destroy(&task.is_done);
}

// Whoever holds it may use what drivers share with their handlers. The thread of
// the handlers has it from one rest to the next.
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
// It is the handlers' turn, or they wait for it.
static int is_their_turn;

static void rest(void *nothing);

static void take_turn(void)
{
    __atomic_store_n(&is_their_turn, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&turn);
    // Without memory for it now, there may be some soon.
    while (rte_eal_alarm_set(1, rest, NULL) != 0)
        usleep(SHORT_REST_US);
}

static int is_up(uint16_t port)
{
    struct rte_eth_link link = { .link_status = RTE_ETH_LINK_DOWN };
    return rte_eth_link_get_nowait(port, &link) == 0 && link.link_status == RTE_ETH_LINK_UP;
}

static void rest(void *nothing)
{
    (void)nothing;
    __atomic_store_n(&is_their_turn, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&turn);
    unsigned watched = 0, up = 0;
    for (uint16_t port = 0; port < RTE_MAX_ETHPORTS; port++) {
        watched += is_watched[port];
        up += is_watched[port] && is_up(port);
    }
    takes_turns = watched > 0;
    if (!takes_turns)
        return;
    if (up == watched)
        usleep(REST_US);
    else if (shortest_rests == 0)
        usleep(SHORT_REST_US);
    else {
        shortest_rests--;
        usleep(SHORTEST_REST_US);
    }
    take_turn();
}

static void watch(void *port)
{
    is_watched[*(uint16_t *)port] = 1;
    if (!takes_turns) {
        takes_turns = 1;
        take_turn();
    }
}

void tg_watch_handlers(uint16_t port)
{
    tg_among_handlers(watch, &port);
}

void tg_unwatch_handlers(uint16_t port)
{
    is_watched[port] = 0;
}

int tg_keep_handlers_out(void)
{
    if (__atomic_load_n(&is_their_turn, __ATOMIC_RELAXED))
        return 0;
    tg_await_handlers();
    return 1;
}

void tg_await_handlers(void)
{
    pthread_mutex_lock(&turn);
}

void tg_let_handlers_in(void)
{
    pthread_mutex_unlock(&turn);
}

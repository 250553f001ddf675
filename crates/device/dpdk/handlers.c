#define ALLOW_EXPERIMENTAL_API
#include <errno.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_interrupts.h>
#include <rte_pause.h>

#include "handlers.h"

// Pauses between handler turns, in microseconds: while all links are up, while any is down, and
// shortly after a device was started, stopped or closed. A memif needs about ten turns to
// connect, and each turn blocks the data path for some microseconds.
#define REST_US 10000
#define SHORT_REST_US 4000
#define SHORTEST_REST_US 50

// Number of shortest pauses after a device was started, stopped or closed.
#define SHORTEST_RESTS 2000

struct task {
    void (*work)(void *argument);
    void *argument;
    sem_t is_done;
    struct task *next;
};

// A thread waiting for the other side polls this often before it sleeps: there may be only one
// processor. Shorter sleeps may end before they begin.
#define PATIENCE 4096
#define BURST_LOOKS 256
#define PAUSE_US 50

// Used by the handler thread only.
static uint8_t is_watched[RTE_MAX_ETHPORTS];
static unsigned shortest_rests;
static int takes_turns;
// The bell has not rung yet in this turn.
static int is_new_turn;

// Rung to make the handler thread call on_bell. This is not an alarm of DPDK: an alarm that is due
// when the one before it returns is run at once, without a look at any descriptor in between. A
// chain of short alarms would keep most handlers from running for as long as it lasts.
static int bell;
static struct rte_intr_handle *bell_handle;

static void ring(void)
{
    eventfd_write(bell, 1);
}

// Tasks that wait for the handler thread.
static pthread_mutex_t waiting_lock = PTHREAD_MUTEX_INITIALIZER;
static struct task *waiting;

// Task whose work is done, but whose thread still waits, and the number of batches since then. Used
// by the handler thread only.
static struct task *finished;
static unsigned batches_since;

// The handler thread learns of events in batches. The batch that contains the bell may contain
// events of descriptors that the work of a task has closed, and so may the next one if a child
// process has the descriptor too: DPDK watches other descriptors only after it has seen, in that
// batch, that its list has changed. If the waiting thread or another task reused such a number, a
// handler would wait for a message that never arrives.
#define BATCHES_WITH_OLD_EVENTS 2

static void release_finished(void)
{
    if (++batches_since < BATCHES_WITH_OLD_EVENTS) {
        ring();
        return;
    }
    sem_post(&finished->is_done);
    finished = NULL;
}

static void run_waiting(void)
{
    pthread_mutex_lock(&waiting_lock);
    struct task *task = waiting;
    if (task != NULL)
        waiting = task->next;
    pthread_mutex_unlock(&waiting_lock);
    if (task == NULL)
        return;
    task->work(task->argument);
    finished = task;
    batches_since = 0;
    shortest_rests = SHORTEST_RESTS;
    ring();
}

void dpdk_among_handlers(void (*work)(void *argument), void *argument)
{
    struct task task = { .work = work, .argument = argument };
    sem_init(&task.is_done, 0, 0);
    pthread_mutex_lock(&waiting_lock);
    task.next = waiting;
    waiting = &task;
    pthread_mutex_unlock(&waiting_lock);
    ring();
    while (sem_wait(&task.is_done) != 0)
        ;
    sem_destroy(&task.is_done);
}

// Set while a thread is in a burst, by slot. Each flag has its own cache line, because its thread
// writes it in every burst.
#define SLOTS 256
static struct {
    atomic_int inside;
} __rte_cache_aligned slots[SLOTS];

// Slots in use, and the number of slots that were ever in use.
static pthread_mutex_t slots_lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t is_taken[SLOTS];
static atomic_uint slots_used;

int dpdk_take_slot(unsigned *slot)
{
    unsigned number = 0;
    pthread_mutex_lock(&slots_lock);
    while (number < SLOTS && is_taken[number])
        number++;
    if (number < SLOTS) {
        is_taken[number] = 1;
        if (number >= slots_used)
            slots_used = number + 1;
    }
    pthread_mutex_unlock(&slots_lock);
    *slot = number;
    return number < SLOTS ? 0 : ENOSPC;
}

void dpdk_return_slot(unsigned slot)
{
    pthread_mutex_lock(&slots_lock);
    is_taken[slot] = 0;
    pthread_mutex_unlock(&slots_lock);
}

// Set while handlers may run or wait to run.
static atomic_int is_their_turn;

// Each side announces its action, then reads the announcement of the other side.
// Both sides need a barrier between the two steps. The handler thread, or the one that closes a
// device, issues it for all threads with membarrier(2), so that a burst needs none. Without that
// system call both sides issue their own.
static int barrier_of_all;

static void begin_barriers(void)
{
    barrier_of_all =
        syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
}

static inline void light_barrier(void)
{
    if (likely(barrier_of_all))
        atomic_signal_fence(memory_order_seq_cst);
    else
        atomic_thread_fence(memory_order_seq_cst);
}

static void heavy_barrier(void)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (barrier_of_all)
        syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
}

static void await_burst(unsigned slot)
{
    unsigned looks = 0;
    while (atomic_load_explicit(&slots[slot].inside, memory_order_acquire)) {
        // A burst takes some microseconds while its thread is running.
        if (looks++ < BURST_LOOKS)
            rte_pause();
        else
            usleep(PAUSE_US);
    }
}

void dpdk_await_bursts(const unsigned *numbers, unsigned count)
{
    heavy_barrier();
    for (unsigned i = 0; i < count; i++)
        await_burst(numbers[i]);
}

static void take_turn(void)
{
    atomic_store_explicit(&is_their_turn, 1, memory_order_relaxed);
    heavy_barrier();
    for (unsigned slot = 0; slot < slots_used; slot++)
        await_burst(slot);
    is_new_turn = 1;
    ring();
}

static int is_up(uint16_t port)
{
    struct rte_eth_link link = { .link_status = RTE_ETH_LINK_DOWN };
    return rte_eth_link_get_nowait(port, &link) == 0 && link.link_status == RTE_ETH_LINK_UP;
}

// Ends the turn of the handlers, and begins the next after a pause. As this blocks the handler
// thread, handlers run in their turns only.
static void rest(void)
{
    atomic_store_explicit(&is_their_turn, 0, memory_order_release);
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

static void on_bell(void *nothing)
{
    (void)nothing;
    eventfd_t rings;
    eventfd_read(bell, &rings);
    if (finished != NULL)
        release_finished();
    if (finished == NULL)
        run_waiting();
    if (!takes_turns)
        return;
    // Events of the pause before this turn may follow the bell in this batch.
    if (is_new_turn) {
        is_new_turn = 0;
        ring();
    } else {
        rest();
    }
}

int dpdk_handlers_start(void)
{
    begin_barriers();
    bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (bell < 0)
        return errno;
    bell_handle = rte_intr_instance_alloc(RTE_INTR_INSTANCE_F_PRIVATE);
    if (bell_handle == NULL || rte_intr_fd_set(bell_handle, bell) != 0
        || rte_intr_type_set(bell_handle, RTE_INTR_HANDLE_EXT) != 0)
        return rte_errno;
    return -rte_intr_callback_register(bell_handle, on_bell, NULL);
}

static void watch(void *port)
{
    is_watched[*(uint16_t *)port] = 1;
    if (!takes_turns) {
        takes_turns = 1;
        take_turn();
    }
}

void dpdk_watch_handlers(uint16_t port)
{
    dpdk_among_handlers(watch, &port);
}

void dpdk_unwatch_handlers(uint16_t port)
{
    is_watched[port] = 0;
}

int dpdk_keep_handlers_out(unsigned slot)
{
    static __thread unsigned refused;
    atomic_store_explicit(&slots[slot].inside, 1, memory_order_relaxed);
    light_barrier();
    if (likely(!atomic_load_explicit(&is_their_turn, memory_order_acquire))) {
        refused = 0;
        return 1;
    }
    dpdk_let_handlers_in(slot);
    if (++refused > PATIENCE) {
        refused = 0;
        usleep(PAUSE_US);
    }
    return 0;
}

void dpdk_await_handlers(unsigned slot)
{
    while (!dpdk_keep_handlers_out(slot))
        usleep(PAUSE_US);
}

void dpdk_let_handlers_in(unsigned slot)
{
    atomic_store_explicit(&slots[slot].inside, 0, memory_order_release);
}

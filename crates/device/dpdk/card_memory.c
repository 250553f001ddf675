// See card_memory.h.

// For rte_dev_dma_map, available since DPDK 19.05.
#define ALLOW_EXPERIMENTAL_API

#include "card_memory.h"

#include <errno.h>
#include <stdlib.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_memory.h>

// Arenas registered with DPDK, and the number of NICs that use each. Other devices copy and need
// no access. virtio_user even fails to start while any arena is registered, because it shares
// all memory with its peer through file descriptors.
static struct {
    uint8_t *base;
    unsigned devices;
} known[RTE_MAX_ETHPORTS];

int dpdk_is_virtual(void)
{
    return rte_eal_iova_mode() == RTE_IOVA_VA;
}

int dpdk_show_to_cards(const struct dpdk_memory *memory)
{
    unsigned free_place = 0;
    for (unsigned i = 0; i < RTE_DIM(known); i++) {
        if (known[i].devices > 0 && known[i].base == memory->base) {
            known[i].devices++;
            return 0;
        }
        if (known[i].devices == 0)
            free_place = i;
    }
    size_t pages = memory->bytes / memory->page_bytes;
    rte_iova_t *addresses = calloc(pages, sizeof(*addresses));
    if (addresses == NULL)
        return ENOMEM;
    for (size_t i = 0; i < pages; i++) {
        uint8_t *page = memory->base + i * memory->page_bytes;
        addresses[i] = dpdk_is_virtual() ? (rte_iova_t)(uintptr_t)page : rte_mem_virt2iova(page);
    }
    int failed = rte_extmem_register(memory->base, memory->bytes, addresses, pages,
        memory->page_bytes);
    free(addresses);
    if (failed)
        return rte_errno;
    known[free_place].base = memory->base;
    known[free_place].devices = 1;
    return 0;
}

void dpdk_hide_from_cards(const struct dpdk_memory *memory)
{
    for (unsigned i = 0; i < RTE_DIM(known); i++)
        if (known[i].devices > 0 && known[i].base == memory->base && --known[i].devices == 0)
            rte_extmem_unregister(memory->base, memory->bytes);
}

int dpdk_cards_see_any(void)
{
    unsigned devices = 0;
    for (unsigned i = 0; i < RTE_DIM(known); i++)
        devices += known[i].devices;
    return devices > 0;
}

int dpdk_let_reach(struct rte_device *card, const struct dpdk_memory *memory, int on)
{
    // Virtual addresses are contiguous.
    size_t step = dpdk_is_virtual() ? memory->bytes : memory->page_bytes;
    for (size_t at = 0; at < memory->bytes; at += step) {
        uint8_t *part = memory->base + at;
        rte_iova_t address = dpdk_is_virtual() ? (rte_iova_t)(uintptr_t)part : rte_mem_virt2iova(part);
        int failed = on ? rte_dev_dma_map(card, part, address, step)
                        : rte_dev_dma_unmap(card, part, address, step);
        if (failed && rte_errno != ENOTSUP)
            return rte_errno;
    }
    return 0;
}

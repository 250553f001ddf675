// DMA access of NICs to the memory of an arena.

#ifndef TIDEGATE_CARD_MEMORY_H
#define TIDEGATE_CARD_MEMORY_H

#include "pool.h"

struct rte_device;

// True if NICs use virtual addresses, which an IOMMU translates.
int dpdk_is_virtual(void);

// Registers the memory with DPDK for one more NIC. Returns 0 or an error number.
int dpdk_show_to_cards(const struct dpdk_memory *memory);
// Drops one NIC's registration; the last one unregisters the memory.
void dpdk_hide_from_cards(const struct dpdk_memory *memory);
// True if any memory is registered.
int dpdk_cards_see_any(void);

// Maps the memory for DMA by a NIC, or unmaps it. Without an IOMMU there is nothing to do.
// Returns 0 or an error number.
int dpdk_let_reach(struct rte_device *card, const struct dpdk_memory *memory, int on);

#endif

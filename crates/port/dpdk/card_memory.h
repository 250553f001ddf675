// Memory of an arena that cards reach by themselves.

#ifndef TIDEGATE_CARD_MEMORY_H
#define TIDEGATE_CARD_MEMORY_H

#include "pool.h"

struct rte_device;

// Whether cards are told virtual addresses, as something translates them.
int tg_is_virtual(void);

// Makes the memory known to DPDK for one more card. Returns 0 or an error number.
int tg_show_to_cards(const struct tg_memory *memory);
// For one card less.
void tg_hide_from_cards(const struct tg_memory *memory);
// Whether there is any such memory.
int tg_cards_see_any(void);

// Lets a card reach the memory, or no longer. Where nothing stands between a card
// and the memory there is nothing to do. Returns 0 or an error number.
int tg_let_reach(struct rte_device *card, const struct tg_memory *memory, int on);

#endif

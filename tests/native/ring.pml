/* The ring as a model for Spin: ranks, bounded links, and the order of csrc/ring_schedule.h for an all-reduce.
 *
 * A link is an array of slots, and two counters that only grow. What a slot holds is (segment, move of its sender), so
 * that a slot read too early or written too early is seen. Deadlock is Spin's invalid end state.
 *
 * Definitions: RANKS, SLOTS, SEGMENTS, WINDOW; faults: NO_CREDITS, NO_WAIT, TAKE_FIRST.
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef SEGMENTS
#define SEGMENTS 3
#endif
#ifndef WINDOW
#define WINDOW 1
#endif

#define LAST (2 * RANKS - 2) /* moves are 0 .. LAST; move 0 receives nothing, move LAST sends nothing */
#define EMPTY 255

typedef Link {
  byte posted; /* segments that left has written */
  byte taken;  /* segments that the owner has consumed */
  byte slot[SLOTS];
};
Link link[RANKS]; /* by the rank that receives */

#define NAME(segment, move) ((segment) * (LAST + 1) + (move))

proctype Rank(byte me) {
  byte right = (me + 1) % RANKS;
  byte sent = 0, received = 0, start = 0, segment, move;

  do
  :: start >= SEGMENTS -> break
  :: else ->
     move = 0;
     do
     :: move > LAST -> break
     :: else ->
        segment = start;
        do
        :: segment >= start + WINDOW || segment >= SEGMENTS -> break
        :: else ->
#ifndef NO_WAIT
           if :: move > 0 -> link[me].posted > received :: else fi;
#endif
#ifndef NO_CREDITS
           if :: move < LAST -> sent - link[right].taken < SLOTS :: else fi;
#endif
#ifdef TAKE_FIRST
           if :: move > 0 -> link[me].taken = received + 1 :: else fi;
#endif
           if
           :: move > 0 ->
              assert(link[me].slot[received % SLOTS] == NAME(segment, move - 1));
              link[me].slot[received % SLOTS] = EMPTY
           :: else
           fi;
           if
           :: move < LAST ->
              assert(link[right].slot[sent % SLOTS] == EMPTY);
              link[right].slot[sent % SLOTS] = NAME(segment, move)
           :: else
           fi;
           if :: move > 0 -> received++; link[me].taken = received :: else fi;
           if :: move < LAST -> sent++; link[right].posted = sent :: else fi;
           segment++
        od;
        move++
     od;
     start = start + WINDOW
  od;
  assert(sent == SEGMENTS * LAST && received == SEGMENTS * LAST)
}

init {
  byte i = 0, j;
  atomic {
    do
    :: i >= RANKS -> break
    :: else ->
       j = 0;
       do :: j >= SLOTS -> break :: else -> link[i].slot[j] = EMPTY; j++ od;
       i++
    od;
    i = 0;
    do :: i >= RANKS -> break :: else -> run Rank(i); i++ od
  }
}

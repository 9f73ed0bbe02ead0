//! The queue of waiting requests: one for each tenant, in order of arrival as shifted by priority.
//! The next tenant is the one with the fewest tokens for its weight.
//!
//! Aging: a level of priority is worth a fixed waiting time. The order of two requests therefore
//! never changes while they wait, a queue is sorted once, and every request gets its turn.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, binary_heap::PeekMut},
    ops::Bound,
};

use crate::{Nanos, NewRequest, request::Request};

/// Place in a tenant's queue: the time of arrival, shifted by priority and deadline; then the order
/// of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OrderKey {
    virtual_arrival: i64,
    arrival: u64,
}

impl OrderKey {
    /// A deadline counts as an arrival one level of priority before it, if that is sooner.
    pub fn new(request: &NewRequest, now: Nanos, arrival: u64, aging: Nanos) -> Self {
        let signed = |nanos: Nanos| i64::try_from(nanos).unwrap_or(i64::MAX);
        let level = signed(aging);
        let by_priority = signed(now).saturating_add(level.saturating_mul(i64::from(request.priority)));
        let by_deadline = request.deadline.map_or(i64::MAX, |deadline| signed(deadline).saturating_sub(level));
        Self { virtual_arrival: by_priority.min(by_deadline), arrival }
    }
}

/// Place in the order of running requests: by tenant, the one with the fewest tokens for its weight
/// first, and then by the place in the tenant's queue. A priority therefore moves a request before
/// others of its tenant, and never before those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    rank: u32,
    tenant: u64,
    key: OrderKey,
}

impl Place {
    pub fn of(request: &Request) -> Self {
        Self { rank: request.rank, tenant: request.tenant, key: request.key }
    }
}

/// Served tokens are multiplied by this and divided by the weight, so that little is lost in
/// rounding.
const SCALE: u128 = 1 << 20;

#[derive(Debug)]
struct Tenant {
    weight: u32,
    /// Tokens computed for the tenant, each counted once, divided by its weight; comparable between
    /// tenants.
    served: u128,
    num_running: usize,
    /// The tenant's place among tenants with running requests, as of the last step.
    rank: u32,
    line: BTreeMap<OrderKey, Box<Request>>,
}

#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// Tenants with a waiting or running request.
    tenants: BTreeMap<u64, Tenant>,
    len: usize,
    num_tokens: usize,
}

/// A search for candidates: the point that it has reached in each tenant's queue.
#[derive(Debug)]
pub(crate) struct Cursor {
    /// Tenants with waiting requests and the tokens they were served when last looked at, the least
    /// first.
    due: BinaryHeap<Reverse<(u128, u64)>>,
    passed: BTreeMap<u64, OrderKey>,
}

impl Cursor {
    /// Moves the search past `key` in the tenant's queue.
    pub fn pass(&mut self, tenant: u64, key: OrderKey) {
        self.passed.insert(tenant, key);
    }
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tokens of all waiting requests.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub fn iter(&self) -> impl Iterator<Item = &Request> {
        self.tenants.values().flat_map(|tenant| tenant.line.values().map(|r| &**r))
    }

    /// Adds a new request to its tenant's queue.
    pub fn push(&mut self, request: Box<Request>, weight: u32) {
        let weight = weight.max(1);
        let fresh = || Tenant { weight, served: 0, num_running: 0, rank: u32::MAX, line: BTreeMap::new() };
        let tenant = self.tenants.entry(request.tenant).or_insert_with(fresh);
        tenant.weight = weight;
        // `put_back` expects a request that has run.
        tenant.num_running += 1;
        self.catch_up(request.tenant);
        self.put_back(request);
    }

    /// A tenant without waiting requests saves up no claim: when it returns, it has been served as
    /// much as the least served tenant with waiting requests. If there is none, all tenants start
    /// equal.
    pub fn catch_up(&mut self, id: u64) {
        if self.tenants.get(&id).is_none_or(|tenant| !tenant.line.is_empty()) {
            return;
        }
        let others = || self.tenants.iter().filter(|&(&other, _)| other != id).map(|(_, tenant)| tenant);
        let waits = |tenant: &&Tenant| !tenant.line.is_empty();
        let least = others().filter(waits).map(|tenant| tenant.served).min();
        let level = least.or_else(|| others().map(|tenant| tenant.served).max()).unwrap_or(0);
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.served = tenant.served.max(level);
    }

    /// Returns a request to its old place in the queue.
    pub fn put_back(&mut self, request: Box<Request>) {
        let tenant = self.tenants.get_mut(&request.tenant).expect("a tenant with a running request is known");
        tenant.num_running -= 1;
        self.len += 1;
        self.num_tokens += request.tokens.len();
        tenant.line.insert(request.key, request);
    }

    /// A search from the beginning. Until it ends no request may be added and no tenant refunded.
    pub fn cursor(&self) -> Cursor {
        let waits = |(_, tenant): &(&u64, &Tenant)| !tenant.line.is_empty();
        let due: Vec<_> = self.tenants.iter().filter(waits).map(|(&id, t)| Reverse((t.served, id))).collect();
        Cursor { due: due.into(), passed: BTreeMap::new() }
    }

    /// The first request after the cursor, of the tenant whose turn it is.
    pub fn next(&self, cursor: &mut Cursor) -> Option<(u64, OrderKey)> {
        while let Some(mut due) = cursor.due.peek_mut() {
            let Reverse((served, id)) = *due;
            let Some(tenant) = self.tenants.get(&id) else {
                PeekMut::pop(due);
                continue;
            };
            if served != tenant.served {
                *due = Reverse((tenant.served, id));
                continue;
            }
            let behind = |&passed: &OrderKey| (Bound::Excluded(passed), Bound::Unbounded);
            let key = match cursor.passed.get(&id).map(behind) {
                Some(range) => tenant.line.range(range).next(),
                None => tenant.line.first_key_value(),
            };
            match key {
                Some((&key, _)) => return Some((id, key)),
                None => PeekMut::pop(due),
            };
        }
        None
    }

    /// Applies `change` to a waiting request, which may add a token.
    pub fn change<T>(&mut self, tenant: u64, key: OrderKey, change: impl FnOnce(&mut Request) -> T) -> Option<T> {
        let request = self.tenants.get_mut(&tenant)?.line.get_mut(&key)?;
        self.num_tokens -= request.tokens.len();
        let result = change(request);
        self.num_tokens += request.tokens.len();
        Some(result)
    }

    /// Takes a request out of the queue: to run, or to be put back at once.
    pub fn take(&mut self, tenant: u64, key: OrderKey) -> Option<Box<Request>> {
        let tenant = self.tenants.get_mut(&tenant)?;
        let request = tenant.line.remove(&key)?;
        tenant.num_running += 1;
        self.len -= 1;
        self.num_tokens -= request.tokens.len();
        Some(request)
    }

    /// A request of the tenant that was taken before has ended. Tenants without requests are
    /// forgotten.
    pub fn ended(&mut self, id: u64) {
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.num_running -= 1;
        if tenant.num_running == 0 && tenant.line.is_empty() {
            self.tenants.remove(&id);
        }
    }

    /// Charges the tenant for `tokens` of a step.
    pub fn charge(&mut self, id: u64, tokens: usize) {
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.served += tokens as u128 * SCALE / u128::from(tenant.weight);
    }

    /// Returns `tokens` that were charged and not computed.
    pub fn refund(&mut self, id: u64, tokens: usize) {
        let tenant = self.tenants.get_mut(&id).expect("a tenant with a running request is known");
        tenant.served = tenant.served.saturating_sub(tokens as u128 * SCALE / u128::from(tenant.weight));
    }

    /// Ranks tenants by the tokens they were served. Returns whether any rank changed. New tenants
    /// come last until then.
    pub fn rank(&mut self) -> bool {
        if self.tenants.len() < 2 {
            return false;
        }
        let mut tenants = Vec::new();
        for tenant in self.tenants.values_mut() {
            match tenant.num_running {
                0 => tenant.rank = u32::MAX,
                _ => tenants.push(tenant),
            }
        }
        // The sort is stable: of equal tenants the one with the lower number is first, as in the
        // queue.
        tenants.sort_by_key(|tenant| tenant.served);
        let mut has_changed = false;
        for (rank, tenant) in (0..).zip(tenants) {
            has_changed |= tenant.rank != rank;
            tenant.rank = rank;
        }
        has_changed
    }

    /// The tenant's rank among those with running requests.
    pub fn rank_of(&self, tenant: u64) -> u32 {
        self.tenants.get(&tenant).map_or(u32::MAX, |tenant| tenant.rank)
    }

    /// The place that a request would have in the order of running requests.
    pub fn place(&self, tenant: u64, key: OrderKey) -> Place {
        Place { rank: self.rank_of(tenant), tenant, key }
    }

    /// Number of running requests of each tenant, for the integrity check.
    pub fn num_running(&self) -> BTreeMap<u64, usize> {
        self.tenants.iter().map(|(&id, tenant)| (id, tenant.num_running)).collect()
    }
}

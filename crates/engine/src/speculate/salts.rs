//! Whose a request is, and what a method keeps for each salt.
//!
//! What is learned from answers shows: in how many guesses hold, which every answer reports, and in its pace. So it
//! belongs to the salt of the requests it was learned from, as blocks of the prefix cache do: what a request is told
//! depends on requests of its own salt, and on nothing that others asked or were answered.
//!
//! Clients may name salts, so there is a bound on how many are kept. Beyond it the tenant that has the most of them loses
//! the one that it used least lately: a key that names ever new salts displaces its own.

use super::mix::Map;

/// Whose a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Whose share of what is kept it counts against.
    pub tenant: u64,
    /// Requests of different salts know nothing of each other.
    pub salt: u64,
}

/// Salts of which anything is kept.
pub(super) const MOST_SALTS: usize = 256;

/// A value for each salt.
#[derive(Debug)]
pub(super) struct Salts<T> {
    kept: Map<u64, Kept<T>>,
    most: usize,
    clock: u64,
}

#[derive(Debug)]
struct Kept<T> {
    value: T,
    /// Who used it last.
    tenant: u64,
    used: u64,
}

impl<T> Default for Salts<T> {
    fn default() -> Self {
        Self::new(MOST_SALTS)
    }
}

impl<T> Salts<T> {
    pub fn new(most: usize) -> Self {
        assert!(most > 0, "room for no salt");
        Self { kept: Map::default(), most, clock: 0 }
    }

    pub fn get(&self, salt: u64) -> Option<&T> {
        self.kept.get(&salt).map(|kept| &kept.value)
    }

    pub fn get_mut(&mut self, salt: u64) -> Option<&mut T> {
        self.kept.get_mut(&salt).map(|kept| &mut kept.value)
    }

    /// The value of a salt that is used now, made if there is none.
    pub fn of(&mut self, owner: Owner, make: impl FnOnce() -> T) -> &mut T {
        self.clock += 1;
        if self.kept.len() >= self.most && !self.kept.contains_key(&owner.salt) {
            self.drop_one(owner.tenant);
        }
        let fresh = || Kept { value: make(), tenant: owner.tenant, used: 0 };
        let kept = self.kept.entry(owner.salt).or_insert_with(fresh);
        (kept.tenant, kept.used) = (owner.tenant, self.clock);
        &mut kept.value
    }

    /// All of them, with the tenant that used each last.
    pub fn values(&self) -> impl Iterator<Item = (u64, &T)> {
        self.kept.values().map(|kept| (kept.tenant, &kept.value))
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.kept.values_mut().map(|kept| (kept.tenant, &mut kept.value))
    }

    /// Makes room for a salt of a tenant.
    fn drop_one(&mut self, tenant: u64) {
        let mut of_tenants: Map<u64, usize> = [(tenant, 1)].into_iter().collect();
        self.kept.values().for_each(|kept| *of_tenants.entry(kept.tenant).or_default() += 1);
        let order = |kept: &Kept<T>| (std::cmp::Reverse(of_tenants[&kept.tenant]), kept.used);
        if let Some((&salt, _)) = self.kept.iter().min_by_key(|(_, kept)| order(kept)) {
            self.kept.remove(&salt);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn salts(salts: &Salts<u32>) -> Vec<u64> {
        let mut all: Vec<u64> = salts.kept.keys().copied().collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn each_salt_has_its_own_and_the_longest_unused_goes() {
        let mut kept = Salts::new(3);
        let owner = |salt| Owner { tenant: 1, salt };
        for salt in [5, 6, 7] {
            *kept.of(owner(salt), || 10) += salt as u32;
        }
        assert_eq!([5, 6, 7, 8].map(|salt| kept.get(salt).copied()), [Some(15), Some(16), Some(17), None]);
        *kept.of(owner(5), || 0) += 1;
        kept.of(owner(8), || 0);
        assert_eq!(salts(&kept), [5, 7, 8]);
        assert_eq!(kept.get(5), Some(&16));
        // To look is not to use.
        assert!(kept.get_mut(7).is_some());
        kept.of(owner(9), || 0);
        assert_eq!(salts(&kept), [5, 8, 9]);
    }

    #[test]
    fn a_tenant_of_many_salts_displaces_its_own() {
        let mut kept = Salts::new(4);
        kept.of(Owner { tenant: 2, salt: 1 }, || 0);
        for salt in 100..1000 {
            kept.of(Owner { tenant: 3, salt }, || 0);
        }
        assert_eq!(salts(&kept), [1, 997, 998, 999]);
        kept.of(Owner { tenant: 2, salt: 2 }, || 0);
        kept.of(Owner { tenant: 2, salt: 3 }, || 0);
        assert_eq!(salts(&kept), [2, 3, 998, 999], "as many for each");
        kept.of(Owner { tenant: 4, salt: 4 }, || 0);
        assert_eq!(salts(&kept), [2, 3, 4, 999], "of those who have the most, the longest unused");
    }
}

//! Memory of the host that blocks of keys and values are kept in.

use std::ops::DerefMut;

/// Bytes that stay where they are for as long as they live, on whatever thread.
pub trait HostMemory: DerefMut<Target = [u8]> + Send {}

impl<T: DerefMut<Target = [u8]> + Send> HostMemory for T {}

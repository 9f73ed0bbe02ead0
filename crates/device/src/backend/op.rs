//! The macro that declares operations.

/// Turns a list of operations into the trait `Operations`, the enum `Op` of the same operations as
/// values, and an `Operations` for each type that takes them as values ([`Intercept`]).
///
/// An argument stands in parentheses unless it is a single word: `(&mut Self::Tensor)` and its like
/// are handles, `(Routing<Self>)` is a struct that holds handles, all others are plain values.
///
/// [`Intercept`]: super::Intercept
macro_rules! operations {
    // The type of an argument in the handle family `$h`.
    (@type $a:lifetime $h:ty, (&mut Self::$handle:ident)) => { &$a mut <$h as Handles>::$handle };
    (@type $a:lifetime $h:ty, (&Self::$handle:ident)) => { &$a <$h as Handles>::$handle };
    (@type $a:lifetime $h:ty, (Option<&Self::$handle:ident>)) => { Option<&$a <$h as Handles>::$handle> };
    (@type $a:lifetime $h:ty, ($holder:ident<Self>)) => { $holder<$a, $h> };
    (@type $a:lifetime $h:ty, (&mut $data:ty)) => { &$a mut $data };
    (@type $a:lifetime $h:ty, (&$data:ty)) => { &$a $data };
    (@type $a:lifetime $h:ty, ($value:ty)) => { $value };
    (@type $a:lifetime $h:ty, $value:ty) => { $value };

    // An argument of a wrapper as an argument of the backend `$b` inside.
    (@inner $b:ty, $value:expr, (&mut Self::$handle:ident)) => {
        BorrowMut::<<$b as Handles>::$handle>::borrow_mut($value)
    };
    (@inner $b:ty, $value:expr, (&Self::$handle:ident)) => { Borrow::<<$b as Handles>::$handle>::borrow($value) };
    (@inner $b:ty, $value:expr, (Option<&Self::$handle:ident>)) => {
        $value.map(Borrow::<<$b as Handles>::$handle>::borrow)
    };
    (@inner $b:ty, $value:expr, ($holder:ident<Self>)) => { $value.inner() };
    (@inner $b:ty, $value:expr, $plain:tt) => { $value };

    // An argument as it is printed: lists that differ from step to step by their length alone.
    (@shown $value:expr, (&mut Vec<$item:ty>)) => {{
        let _ = $value;
        &"_"
    }};
    (@shown $value:expr, (&mut [$item:ty])) => { &$value.len() };
    (@shown $value:expr, (&[$item:ty])) => { &$value.len() };
    (@shown $value:expr, $other:tt) => { $value };

    // An operation without a default is taken as it is, one with a default perhaps as its parts.
    (@take $t:ty, ;, $whole:expr) => { $whole };
    (@take $t:ty, $parts:block, $whole:expr) => { if <$t as Intercept>::WHOLE { $whole } else $parts };

    ($(
        $(#[$attribute:meta])*
        $variant:ident = fn $name:ident(&mut $this:ident, $($argument:ident: $kind:tt),+ $(,)?) $body:tt
    )*) => {
        /// Computes on the memory of a device. Activations are `[rows, width]`: one row a token,
        /// of whichever request.
        ///
        /// An operation of a step allocates nothing, returns nothing to the host and never branches
        /// on a tensor's contents, so a device may record it once and replay it
        /// ([`Steps::begin`](crate::Steps::begin)). Its documentation says so if an operation
        /// copies from or to the host instead.
        pub trait Operations: Handles {
            $(
                $(#[$attribute])*
                fn $name(&mut $this, $($argument: operations!(@type '_ Self, $kind)),+) $body
            )*
        }

        /// An operation of [`Operations`] with its arguments.
        pub enum Op<'a, H: Handles> {
            $(
                #[doc = concat!("[`Operations::", stringify!($name), "`]")]
                $variant { $($argument: operations!(@type 'a H, $kind)),+ },
            )*
        }

        impl<'a, H: Handles> Op<'a, H> {
            /// The name of its method.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => stringify!($name),)*
                }
            }

            /// The same operation on the handles of the backend inside.
            pub fn inner<B: Handles>(self) -> Op<'a, B>
            where
                H: Wraps<B>,
            {
                match self {
                    $(Self::$variant { $($argument),+ } => Op::$variant {
                        $($argument: operations!(@inner B, $argument, $kind)),+
                    },)*
                }
            }

            /// Calls its method.
            pub fn run(self, backend: &mut H)
            where
                H: Operations,
            {
                match self {
                    $(Self::$variant { $($argument),+ } => backend.$name($($argument),+),)*
                }
            }
        }

        impl<H> Debug for Op<'_, H>
        where
            H: Debug
                + Handles<Tensor: Debug, Vector: Debug, Weight: Debug, Experts: Debug, Kv: Debug, Inputs: Debug>,
        {
            fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$variant { $($argument),+ } => {
                        let mut out = out.debug_struct(stringify!($name));
                        $(out.field(stringify!($argument), operations!(@shown $argument, $kind));)+
                        out.finish()
                    })*
                }
            }
        }

        impl<T: Intercept> Operations for T {
            $(
                fn $name(&mut $this, $($argument: operations!(@type '_ Self, $kind)),+) {
                    operations!(@take T, $body, $this.intercept(Op::$variant { $($argument),+ }))
                }
            )*
        }
    };
}

pub(super) use operations;

//! A date and time given by the caller, and the `strftime` of it that templates ask for.

use std::fmt::Write;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A wall-clock time with no zone: what a person near the server would read off a clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WallTime {
    year: i32,
    /// The month, 1 to 12.
    month: u32,
    /// The day of the month, 1 to 31.
    day: u32,
    hour: u32,
    minute: u32,
    second: u32,
}

impl WallTime {
    /// The time `unix_seconds` after 1970-01-01 00:00, shifted by the zone's offset.
    pub fn from_unix(unix_seconds: i64, offset_seconds: i32) -> Self {
        let local = unix_seconds.saturating_add(i64::from(offset_seconds));
        let (days, second_of_day) = (local.div_euclid(86_400), local.rem_euclid(86_400) as u32);
        // Days are counted from 1 March of year 0, so that a leap day is the last of its year; an
        // era is 400 years.
        let shifted = days.clamp(-1_000_000_000, 1_000_000_000) + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let day = (day_of_year - (153 * march_month + 2) / 5 + 1) as u32;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 } as u32;
        let year = (era * 400 + year_of_era) as i32 + i32::from(month <= 2);
        WallTime {
            year,
            month,
            day,
            hour: second_of_day / 3600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
        }
    }

    /// Days since 1 January, from 0.
    fn day_of_year(self) -> u32 {
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][self.month as usize - 1];
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        before + self.day - 1 + u32::from(leap && self.month > 2)
    }

    /// The day of the week; 0 is Sunday.
    fn weekday(self) -> u32 {
        let years = i64::from(self.year) - 1;
        let leap_days = years.div_euclid(4) - years.div_euclid(100) + years.div_euclid(400);
        (years * 365 + leap_days + i64::from(self.day_of_year()) + 1).rem_euclid(7) as u32
    }
}

/// Python's `datetime.strftime` in the C locale. A letter it does not know stays as written.
pub fn format(time: WallTime, format: &str) -> String {
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        match rest.next() {
            Some('-') => {
                let mut field = String::new();
                let letter = rest.next().unwrap_or('-');
                write_field(&mut field, time, letter);
                let bare = field.trim_start_matches(['0', ' ']);
                out.push_str(if bare.is_empty() && !field.is_empty() { "0" } else { bare });
            }
            Some(letter) => write_field(&mut out, time, letter),
            None => out.push('%'),
        }
    }
    out
}

fn write_field(out: &mut String, time: WallTime, letter: char) {
    let hour12 = (time.hour + 11) % 12 + 1;
    let month = MONTHS[time.month as usize - 1];
    let weekday = DAYS[time.weekday() as usize];
    let nested = |pattern: &str| format(time, pattern);
    let _ = match letter {
        'Y' => write!(out, "{}", time.year),
        'y' => write!(out, "{:02}", time.year.rem_euclid(100)),
        'C' => write!(out, "{:02}", time.year.div_euclid(100)),
        'm' => write!(out, "{:02}", time.month),
        'd' => write!(out, "{:02}", time.day),
        'e' => write!(out, "{:2}", time.day),
        'j' => write!(out, "{:03}", time.day_of_year() + 1),
        'H' => write!(out, "{:02}", time.hour),
        'k' => write!(out, "{:2}", time.hour),
        'I' => write!(out, "{hour12:02}"),
        'l' => write!(out, "{hour12:2}"),
        'M' => write!(out, "{:02}", time.minute),
        'S' => write!(out, "{:02}", time.second),
        'f' => write!(out, "000000"),
        'p' => write!(out, "{}", if time.hour < 12 { "AM" } else { "PM" }),
        'B' => write!(out, "{month}"),
        'b' | 'h' => write!(out, "{}", &month[..3]),
        'A' => write!(out, "{weekday}"),
        'a' => write!(out, "{}", &weekday[..3]),
        'w' => write!(out, "{}", time.weekday()),
        'u' => write!(out, "{}", (time.weekday() + 6) % 7 + 1),
        'F' => write!(out, "{}", nested("%Y-%m-%d")),
        'T' | 'X' => write!(out, "{}", nested("%H:%M:%S")),
        'R' => write!(out, "{}", nested("%H:%M")),
        'D' | 'x' => write!(out, "{}", nested("%m/%d/%y")),
        'c' => write!(out, "{}", nested("%a %b %e %H:%M:%S %Y")),
        'n' => writeln!(out),
        't' => write!(out, "\t"),
        // No zone is known, as for Python's naive datetime.
        'z' | 'Z' => Ok(()),
        '%' => write!(out, "%"),
        other => write!(out, "%{other}"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expectations are Python's for the same moments.
    #[test]
    fn dates_are_told_as_python_tells_them() {
        let check = |unix: i64, pattern: &str, expect: &str| {
            assert_eq!(format(WallTime::from_unix(unix, 0), pattern), expect, "{unix} {pattern}");
        };
        check(0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001");
        check(951_782_400, "%F %a %j %u", "2000-02-29 Tue 060 2");
        check(1_772_694_489, "%d %b %Y", "05 Mar 2026");
        check(1_772_694_489, "%B %-d, %Y %I:%M %p %%", "March 5, 2026 07:08 AM %");
        check(1_772_694_489, "%c|%x|%X|%y|%w|%-H", "Thu Mar  5 07:08:09 2026|03/05/26|07:08:09|26|4|7");
        check(4_102_444_799, "%F %T", "2099-12-31 23:59:59");
        check(-1, "%F %T %A", "1969-12-31 23:59:59 Wednesday");
        check(0, "100%", "100%");
        assert_eq!(format(WallTime::from_unix(0, 3600), "%H"), "01");
    }
}

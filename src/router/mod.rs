//! (router)

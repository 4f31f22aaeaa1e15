# Completes lmbench's command line in zsh; files where lmbench has nothing to offer.
_lmbench() {
    local -a words_offered=(${(f)"$($words[1] completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    (( $#words_offered )) && compadd -a words_offered || _files
}
compdef _lmbench lmbench
